"""What the service answers agrees with the files of an output, and follows its switches."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.encoder.pool import EncoderPool, PoolFacts
from surge_dagster.engine.errors import ConfigError, EncoderError, SurgeError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.current_space import read_current, write_current
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.service import space_lanes
from surge_dagster.service import spaces as spaces_module
from surge_dagster.service.errors import LaneClosed, LaneDown, SpaceLoading, UnknownSpace
from surge_dagster.service.metrics import Metrics
from surge_dagster.service.space_lanes import LaneSettings, SpaceLanes
from surge_dagster.service.spaces import ServedSpaces
from tests.engine.runs import finish, in_memory, make_run
from tests.service.lanes import until
from tests.small_catalogs import numbered_rows, read_embedded
from tests.spaces import Spaces

pytestmark = pytest.mark.usefixtures("no_leaks")

A, B = "hash://16", "hash://24"


@contextmanager
def serving(store: Store, **settings: Any) -> Iterator[ServedSpaces]:
    """Served spaces with a promise that a busy machine keeps, if no other one is given."""
    chosen: dict[str, Any] = {"promised_seconds": 10.0} | settings
    with ServedSpaces(store, LaneSettings("cpu", **chosen)) as spaces:
        spaces.start()
        yield spaces


def switch(store: Store, name: str) -> None:
    write_current(store, name, seen=read_current(store))


def test_vectors_are_those_of_files_and_of_searches_in_a_space_and_in_what_is_derived_from_it(
    tmp_path: Path,
) -> None:
    spec = EncodingSpec("hash://16", document_prompt="d: ", query_prompt="q: ")
    rows = numbered_rows("a", 30)
    texts = [text for _, text in rows]
    with (
        EncoderPool(spec, devices="cpu") as pool,
        EncoderPool(spec, task="query", devices="cpu") as of_queries,
    ):
        finish(make_run(pool, in_memory({"a": rows}), tmp_path))
        expected = of_queries.vectors(pa.array(texts, pa.large_string()))  # pyright: ignore[reportArgumentType]
        parent = pool.space
    store = open_store(tmp_path)
    runs = [DeriveRun(store, parent, "float32", 8), DeriveRun(store, parent, "int8", 12)]
    assert [len(list(run.events())) for run in runs] == [1, 1]
    cut, int8 = (run.space for run in runs)
    with serving(store) as spaces:
        found = spaces.find("current")
        assert (found.space, found.state, found.dimensions) == (
            replace(parent, model_path=""),
            "current",
            (16, 8),
        )
        assert found.documents.pool.worker_pids == [], (
            "documents need no memory before the first one"
        )
        files = read_embedded(tmp_path, parent.name, "a").matrix
        documents = found.documents.accept(texts).result()
        pids = [pid for lane in (found.queries, found.documents) for pid in lane.pool.worker_pids]
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids] == [
            min(19, own + more) for more in (4, 13)
        ]
        assert np.array_equal(found.converted(documents.vectors, None), files)
        queries = found.queries.accept(texts).result()
        assert np.array_equal(found.converted(queries.vectors), expected)
        assert not np.array_equal(files, expected)
        counted = [1 + len(f"q: {text}") // 4 for text in texts]
        assert documents.tokens.tolist() == queries.tokens.tolist() == counted
        smaller = read_embedded(tmp_path, cut.name, "a").matrix
        assert np.array_equal(found.converted(documents.vectors, 8), smaller)
        of_cut = spaces.find(cut.name)
        assert of_cut.queries is found.queries and of_cut.documents is found.documents
        assert (of_cut.state, of_cut.dimensions) == ("next", (8,))
        assert np.array_equal(of_cut.converted(documents.vectors), smaller)
        of_int8 = spaces.find(int8.name)
        assert of_int8.dimensions == (12, 8)
        assert of_int8.converted(queries.vectors).dtype == np.float32
        assert np.linalg.norm(of_int8.converted(queries.vectors), axis=1) == pytest.approx(1)
        switch(store, int8.name)
        until(lambda: spaces.find("current").space == int8)
        assert spaces.find("hash://16").space == int8
        assert spaces.find("current").queries is found.queries, "no model is loaded again"


def test_switches_are_followed_with_warm_lanes_and_old_spaces_are_answered_by_name(
    three_spaces: Spaces, tmp_path: Path
) -> None:
    made = three_spaces.copy_to(tmp_path, (A, B))
    store, (a, b, c) = made.store, three_spaces.names()
    switch(store, a)
    with serving(store) as spaces:
        assert spaces.is_ready and spaces.is_alive
        until(lambda: len(spaces.served()) == 2)
        assert [(each.space.name, each.state) for each in spaces.served()] == [
            (a, "current"),
            (b, "next"),
        ]
        assert spaces.find(B).space.name == spaces.find(b).space.name == b
        old, warm = spaces.find(a), spaces.find(b)
        with pytest.raises(UnknownSpace) as unknown:
            spaces.find(c)
        assert unknown.value.names == ["current", a, b, A, B]
        switch(store, b)
        until(lambda: spaces.find("current").space.name == b)
        assert spaces.find("current").queries is warm.queries
        assert (spaces.find(a).state, spaces.find(a).queries) == ("draining", old.queries)
        assert old.queries.accept(["still"]).result().vectors.shape == (1, 16)
        shutil.copytree(three_spaces.root / "output" / c, tmp_path / "output" / c)
        until(lambda: len(spaces.served()) == 3)
        assert spaces.find(c).state == "next"
        switch(store, c)
        until(lambda: spaces.find("current").space.name == c)
        until(lambda: [each.space.name for each in spaces.served()] == [c, b])
        until(lambda: not old.queries.is_alive)
        with pytest.raises(LaneClosed):
            old.queries.accept(["too late"])
        assert (
            f'surge_texts_total{{side="query",space="{a}"}} 1.0'
            in Metrics(spaces).text().decode().splitlines()
        )
        switch(store, b)
        until(lambda: spaces.find("current").queries is warm.queries)
        assert spaces.is_ready
    assert not spaces.is_alive


def test_switch_is_followed_at_the_next_look_of_which_there_are_two_each_second(
    three_spaces: Spaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[tuple[float, Callable[[], None]]]()

    def noted(seconds: float, look: Callable[[], None], name: str) -> AbstractContextManager[None]:
        looks.append((seconds, look))
        return nullcontext()

    made = three_spaces.copy_to(tmp_path, (A, B))
    a, b, _ = three_spaces.names()
    switch(made.store, a)
    monkeypatch.setattr(spaces_module, "every", noted)
    with serving(made.store) as spaces:
        until(lambda: len(spaces.served()) == 2)
        [(seconds, look)] = looks
        assert seconds <= 0.5
        for name in (b, a, b):
            switch(made.store, name)
            look()
            assert spaces.find("current").space.name == name


def test_space_without_requests_for_long_is_drained(
    three_spaces: Spaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three_spaces.copy_to(tmp_path, (A, B))
    a, b, _ = three_spaces.names()
    switch(made.store, a)
    with serving(made.store) as spaces:
        until(lambda: len(spaces.served()) == 2)
        switch(made.store, b)
        until(lambda: spaces.find(a).state == "draining")
        monkeypatch.setattr(spaces_module, "_DRAINED_SECONDS", -1.0)
        until(lambda: [each.space.name for each in spaces.served()] == [b])


def test_nobody_answers_as_the_current_space_while_its_model_is_loaded(
    three_spaces: Spaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, go = three_spaces.copy_to(tmp_path, (A, B)), threading.Event()
    a, b, _ = three_spaces.names()
    switch(made.store, a)
    start = SpaceLanes.start

    def start_later(lanes: SpaceLanes, **options: Any) -> None:
        if lanes.sha256 == made.of(B).spec_sha256:
            go.wait()
        start(lanes, **options)

    monkeypatch.setattr(SpaceLanes, "start", start_later)
    with serving(made.store) as spaces:
        switch(made.store, b)
        until(lambda: spaces._current is not None and spaces._current.name == b)
        for model in ("current", b, B):
            with pytest.raises(SpaceLoading, match="is being loaded") as loading:
                spaces.find(model)
            assert loading.value.retry_after_seconds > 0
        assert not spaces.is_ready and spaces.is_alive
        assert spaces.find(a).queries.accept(["old"]).result().vectors.shape == (1, 16)
        go.set()
        until(lambda: spaces.is_ready)
        assert spaces.find("current").space.name == b


@pytest.mark.parametrize(
    ("kind", "message", "reason"),
    [
        (ConfigError, "the model is gone", "the model is gone"),
        (
            EncoderError,
            "worker 12 ended",
            "ready: its workers failed, and the service's log says why; try",
        ),
    ],
)
def test_model_that_cannot_be_loaded_is_named_and_what_is_served_stays(
    three_spaces: Spaces,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[SurgeError],
    message: str,
    reason: str,
) -> None:
    made = three_spaces.copy_to(tmp_path, (A, B))
    a, b, _ = three_spaces.names()
    switch(made.store, a)
    start = SpaceLanes.start

    def refuse(lanes: SpaceLanes, **options: Any) -> None:
        if lanes.sha256 == made.of(B).spec_sha256:
            raise kind(message)
        start(lanes, **options)

    monkeypatch.setattr(SpaceLanes, "start", refuse)
    with serving(made.store) as spaces:
        until(lambda: spaces._failed)
        with pytest.raises(SpaceLoading, match=reason):
            spaces.find(b)
        assert spaces.find("current").space.name == a
        monkeypatch.undo()
        spaces._failed.clear()
        until(lambda: len(spaces.served()) == 2)


def test_output_that_cannot_be_read_for_a_while_leaves_what_is_served(
    three_spaces: Spaces, tmp_path: Path
) -> None:
    made = three_spaces.copy_to(tmp_path, (A,))
    with serving(made.store) as spaces:
        made.pointer.write_text("{")
        until(lambda: spaces._trouble)
        assert spaces.find("current").space.name == made.of(A).name
        made.pointer.unlink()
        until(lambda: not spaces._trouble)


@pytest.mark.parametrize("task", ["query", "document"])
def test_other_tokenizer_than_that_of_the_files_is_refused(
    three_spaces: Spaces,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    task: str,
) -> None:
    made = three_spaces.copy_to(tmp_path, (A,))
    file = tmp_path / "output" / made.of(A).name / "space.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer": "1234 tokenizers-1"}))
    start = EncoderPool.start

    def start_with_other_tokenizer(pool: EncoderPool) -> PoolFacts:
        return replace(
            start(pool), tokenizer="5678 tokenizers-2" if pool.space.task == task else ""
        )

    monkeypatch.setattr(EncoderPool, "start", start_with_other_tokenizer)
    if task == "query":
        with pytest.raises(ConfigError, match="expected 1234"), serving(made.store):
            pass
        return
    with serving(made.store) as spaces:
        served = spaces.find("current")
        with pytest.raises(LaneDown, match="the service's log says why"):
            served.documents.accept(["a"]).result()
        assert "expected 1234" in caplog.text
        until(lambda: not served.documents.is_alive)
        assert served.queries.accept(["a"]).result().vectors.shape == (1, 16)
        assert spaces.is_alive
        monkeypatch.setattr(EncoderPool, "start", start)
        monkeypatch.setattr(spaces_module, "_LOAD_AGAIN_SECONDS", 0.0)
        until(lambda: spaces.find("current").documents is not served.documents)
        assert spaces.find("current").documents.accept(["a"]).result().vectors.shape == (1, 16)
        assert spaces.find("current").queries is served.queries


def test_space_whose_query_workers_are_given_up_is_loaded_again(
    three_spaces: Spaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three_spaces.copy_to(tmp_path, (A,))
    monkeypatch.setattr(space_lanes, "_MAX_RESPAWNS", 0)
    with serving(made.store) as spaces:
        lost = spaces.find("current").queries
        assert lost.promise
        assert lost.pool.dispatcher().hang_timeout_seconds == max(
            5, 10 * lost.promise.full_pass_seconds
        )
        [worker] = lost.pool.worker_pids
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(LaneDown):
            lost.accept(["a"]).result()
        until(lambda: not spaces.served())
        with pytest.raises(
            SpaceLoading, match="its workers failed, and the service's log says why; try again in"
        ):
            spaces.find("current")
        assert not spaces.is_ready
        spaces._failed.clear()
        until(lambda: spaces.is_ready)
        assert spaces.find("current").queries.accept(["a"]).result().vectors.shape == (1, 16)


def test_start_refuses_what_cannot_be_served(three_spaces: Spaces, tmp_path: Path) -> None:
    made = three_spaces.copy_to(tmp_path, (A, B))
    with pytest.raises(ConfigError, match="holds several spaces"), serving(made.store):
        pass
    with (
        pytest.raises(ConfigError, match="holds no embeddings"),
        serving(open_store(tmp_path / "empty")),
    ):
        pass
    with pytest.raises(ConfigError, match="share of bulk work"):
        LaneSettings(bulk_share=0.9)
    switch(made.store, made.of(A).name)
    with (
        pytest.raises(ConfigError, match="The smallest promise is"),
        serving(made.store, promised_seconds=1e-6),
    ):
        pass
    with serving(made.store, promised_seconds=60.0) as spaces:
        promise = spaces.find("current").queries.promise
        assert promise is not None and promise.promised_seconds == 60
    trusted = replace(
        EncodingSpec("hash://4").resolve(),
        requested=EncodingSpec("hash://4", trust_remote_code="abc"),
    )
    claim_space(made.store, trusted)
    switch(made.store, trusted.name)
    with pytest.raises(ConfigError, match="names code of the model"), serving(made.store):
        pass
