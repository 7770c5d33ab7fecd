"""What the service answers agrees with the files of an output, and follows its switches."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.encoder.pool import EncoderPool, PoolFacts
from surge_dagster.engine.encoder.speed import Speed
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.current_space import read_current, write_current
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.service import spaces as spaces_module
from surge_dagster.service.errors import Refusal
from surge_dagster.service.spaces import (
    LaneSettings,
    ServedSpaces,
    SpaceLanes,
    converted,
    start_lanes,
)
from tests.engine.runs import finish, in_memory, make_run
from tests.small_catalogs import numbered_rows, read_embedded
from tests.spaces import Spaces
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")

A = "hash://16"
B = "hash://24"
ROWS = numbered_rows("a", 30)
TEXTS = [text for _, text in ROWS]
PROMPTED = EncodingSpec("hash://16", document_prompt="d: ", query_prompt="q: ")


@contextmanager
def serving(store: Store, **settings: Any) -> Iterator[ServedSpaces]:
    """Yield served spaces with a promise that a busy machine keeps, if no other one is given."""
    chosen: dict[str, Any] = {"promised_seconds": 10.0} | settings
    with ServedSpaces(store, LaneSettings("cpu", **chosen)) as spaces:
        spaces.start()
        yield spaces


def switch(store: Store, name: str) -> None:
    write_current(store, name, seen=read_current(store))


def embedded(output: Path) -> Space:
    """Embed a catalog whose queries and documents have prompts."""
    with EncoderPool(PROMPTED, devices="cpu") as pool:
        finish(make_run(pool, in_memory({"a": ROWS}), output))
        return pool.space


@pytest.fixture
def two_spaces(three_spaces: Spaces, tmp_path: Path) -> Spaces:
    """An output with the spaces of A, which is current, and of B."""
    made = three_spaces.copy_to(tmp_path, (A, B))
    switch(made.store, made.of(A).name)
    return made


def test_vectors_are_those_of_files_and_of_searches(tmp_path: Path) -> None:
    space = embedded(tmp_path)
    files = read_embedded(tmp_path, space.name, "a").matrix
    with EncoderPool(PROMPTED, task="query", devices="cpu") as pool:
        expected = pool.vectors(pa.array(TEXTS, pa.large_string()))

    with serving(open_store(tmp_path)) as spaces:
        served = spaces.find("current")
        documents = served.documents.accept(TEXTS).result()
        queries = served.queries.accept(TEXTS).result()

    assert np.array_equal(documents.vectors, files)
    assert np.array_equal(queries.vectors, expected)
    assert queries.tokens == sum(1 + len(f"q: {text}") // 4 for text in TEXTS)


def test_worker_for_documents_starts_late_at_a_higher_niceness(
    tmp_path: Path,
) -> None:
    embedded(tmp_path)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with serving(open_store(tmp_path)) as spaces:
        served = spaces.find("current")
        assert served.documents.pool.worker_pids == []

        served.documents.accept(TEXTS).result()

        for lane, more in ((served.queries, 4), (served.documents, 13)):
            [pid] = lane.pool.worker_pids
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + more)


def test_lane_whose_pool_has_given_up_is_replaced_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded(tmp_path)
    monkeypatch.setattr(spaces_module, "_LOAD_AGAIN_SECONDS", 0.0)
    with serving(open_store(tmp_path)) as spaces:
        failed = spaces.find("current").queries
        failed.pool.close()

        until(lambda: spaces.is_ready and spaces.find("current").queries is not failed)

        assert spaces.find("current").queries.accept(TEXTS).result().vectors.shape == (30, 16)


def test_lane_for_documents_is_replaced_under_a_warm_one_for_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded(tmp_path)
    monkeypatch.setattr(spaces_module, "_LOAD_AGAIN_SECONDS", 0.0)
    with serving(open_store(tmp_path)) as spaces:
        before = spaces.find("current")
        expected = before.documents.accept(TEXTS).result().vectors
        before.documents.pool.close()

        until(lambda: spaces.find("current").documents is not before.documents)

        after = spaces.find("current")
        assert after.queries is before.queries
        assert np.array_equal(after.documents.accept(TEXTS).result().vectors, expected)


def test_pool_that_fails_soon_after_it_was_loaded_is_loaded_after_a_pause(tmp_path: Path) -> None:
    embedded(tmp_path)
    with serving(open_store(tmp_path)) as spaces:
        failed = spaces.find("current").queries
        failed.pool.close()
        until(lambda: not spaces._lanes)

        spaces._follow()

        assert not spaces._lanes
        with pytest.raises(Refusal) as refused:
            failed.accept(["a"]).result()
        assert refused.value.status == 503
        spaces._load_again_at.clear()  # the pause is over
        until(lambda: spaces.is_ready)


def test_derived_space_is_encoded_by_the_lanes_of_its_parent(tmp_path: Path) -> None:
    parent = embedded(tmp_path)
    store = open_store(tmp_path)
    runs = [DeriveRun(store, parent, "float32", 8), DeriveRun(store, parent, "int8", 12)]
    for run in runs:
        list(run.events())
    cut, int8 = (run.space for run in runs)
    with serving(store) as spaces:
        before = spaces.find("current")
        assert before.dimensions == (16, 8)
        vectors = before.documents.accept(TEXTS).result().vectors
        smaller = read_embedded(tmp_path, cut.name, "a").matrix
        assert np.array_equal(converted(before.space, vectors, 8), smaller)

        switch(store, int8.name)
        until(lambda: spaces.find("current").space == int8)

        after = spaces.find("hash://16")
        assert after.queries is before.queries, "no model is loaded again"
        assert after.dimensions == (12, 8)
        assert converted(after.space, vectors).dtype == np.float32


def test_current_and_next_space_are_found_by_name_and_by_model(two_spaces: Spaces) -> None:
    a = two_spaces.of(A).name
    b = two_spaces.of(B).name
    with serving(two_spaces.store) as spaces:
        until(lambda: len(spaces.served) == 2)
        found = [(each.space.name, each.state) for each in spaces.served]
        assert found == [(a, "current"), (b, "next")]
        for model in (a, A, "current"):
            assert spaces.find(model).space.name == a
        for model in (b, B):
            assert spaces.find(model).space.name == b
        with pytest.raises(Refusal, match=f"Use current, {a}, {b}, {A}, {B}"):
            spaces.find("other")


def test_switch_finds_the_next_space_warm_and_ends_the_old_one(two_spaces: Spaces) -> None:
    a = two_spaces.of(A).name
    b = two_spaces.of(B).name
    with serving(two_spaces.store) as spaces:
        until(lambda: len(spaces.served) == 2)
        old, warm = spaces.served

        switch(two_spaces.store, b)

        until(lambda: spaces.find("current").space.name == b)
        assert spaces.find("current").queries is warm.queries
        assert spaces.is_ready
        until(lambda: not old.queries.is_alive)
        with pytest.raises(Refusal, match="is not served"):
            spaces.find(a)
        until(lambda: len(spaces._load_again_at) == 1)  # so that a switch back does not wait
    assert not spaces.is_alive


def test_space_that_was_current_is_never_the_next_one(three_spaces: Spaces, tmp_path: Path) -> None:
    made = three_spaces.copy_to(tmp_path)
    names = made.names()
    switch(made.store, names[0])
    with serving(made.store) as spaces:
        for name in names[1:]:
            switch(made.store, name)
            until(lambda name=name: spaces.is_ready and spaces.find("current").space.name == name)

        assert [space.name for space in spaces._wanted] == names[-1:]


def test_nobody_answers_as_the_current_space_while_its_model_is_loaded(
    two_spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = two_spaces.of(B)
    go = threading.Event()
    is_loading = threading.Event()

    def start_later(space: Space, settings: LaneSettings) -> SpaceLanes:
        if space.spec_sha256 == b.spec_sha256:
            is_loading.set()
            go.wait()
        return start_lanes(space, settings)

    monkeypatch.setattr(spaces_module, "start_lanes", start_later)
    with serving(two_spaces.store) as spaces:
        until(is_loading.is_set)
        switch(two_spaces.store, b.name)
        with pytest.raises(Refusal, match="is being loaded") as loading:
            spaces.find(b.name)
        assert loading.value.status == 503

        go.set()

        until(lambda: spaces.is_ready and spaces.find("current").space.name == b.name)


def test_model_that_cannot_be_loaded_leaves_what_is_served(
    two_spaces: Spaces, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    b = two_spaces.of(B)

    def refuse(space: Space, settings: LaneSettings) -> SpaceLanes:
        if space.spec_sha256 == b.spec_sha256:
            raise ConfigError("the model is gone")
        return start_lanes(space, settings)

    monkeypatch.setattr(spaces_module, "start_lanes", refuse)
    monkeypatch.setattr(spaces_module, "_LOAD_AGAIN_SECONDS", 0.1)
    with serving(two_spaces.store) as spaces:
        until(lambda: "the model is gone" in caplog.text)
        with pytest.raises(Refusal, match="the service's log says why"):
            spaces.find(b.name)
        assert spaces.find("current").space.name == two_spaces.of(A).name

        monkeypatch.undo()

        until(lambda: len(spaces.served) == 2)


def test_output_that_cannot_be_read_for_a_while_leaves_what_is_served(
    two_spaces: Spaces, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(two_spaces.store) as spaces:
        two_spaces.pointer.write_text("{")
        until(lambda: two_spaces.pointer.name in caplog.text)
        assert spaces.find("current").space.name == two_spaces.of(A).name
    caplog.clear()  # its records keep the error, and what was open then


@pytest.mark.parametrize("task", ["query", "document"])
def test_other_tokenizer_than_that_of_the_files_is_refused(
    two_spaces: Spaces, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, task: str
) -> None:
    file = two_spaces.root / "output" / two_spaces.of(A).name / "space.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer": "1234 tokenizers-1"}))
    start = EncoderPool.start

    def start_with_other_tokenizer(pool: EncoderPool) -> PoolFacts:
        facts = start(pool)
        return replace(facts, tokenizer="5678 other" if pool.space.task == task else "")

    with monkeypatch.context() as patched:
        patched.setattr(EncoderPool, "start", start_with_other_tokenizer)
        if task == "query":
            with pytest.raises(ConfigError, match="expected 1234"), serving(two_spaces.store):
                pass
            return
        with serving(two_spaces.store) as spaces:
            served = spaces.find("current")
            with pytest.raises(Refusal, match="the service's log says why"):
                served.documents.accept(["a"]).result()
            assert served.queries.accept(["a"]).result().vectors.shape == (1, 16)
    assert "expected 1234" in caplog.text


def test_promise_that_cannot_be_kept_is_raised_with_a_warning(
    two_spaces: Spaces, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(two_spaces.store, promised_seconds=1e-6) as spaces:
        promise = spaces.find("current").queries.promise
        assert promise is not None
        assert promise.promised_seconds == promise.smallest_seconds
    assert "less cannot be kept" in caplog.text


@pytest.mark.parametrize(("wanted", "promised"), [(0.25, 0.25), (None, 0.1)])
def test_promise_of_a_busy_start_falls_while_no_query_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: float | None, promised: float
) -> None:
    embedded(tmp_path)
    slow = Speed.given(call_seconds=10.0, text_seconds=0.1, workers=1)
    monkeypatch.setattr(EncoderPool, "speed", slow)
    monkeypatch.setattr(spaces_module, "_MEASURE_AGAIN_SECONDS", 0.0)
    with serving(open_store(tmp_path), promised_seconds=wanted) as spaces:
        queries = spaces.find("current").queries

        until(lambda: queries.promise and queries.promise.promised_seconds == promised)


def test_output_without_a_current_space_is_refused(three_spaces: Spaces, tmp_path: Path) -> None:
    made = three_spaces.copy_to(tmp_path, (A, B))
    with pytest.raises(ConfigError, match="holds several spaces"), serving(made.store):
        pass


def test_code_that_only_the_output_names_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    requested = EncodingSpec("hash://4", trust_remote_code="abc")
    claim_space(store, replace(EncodingSpec("hash://4").resolve(), requested=requested))
    with pytest.raises(ConfigError, match="names code of the model"), serving(store):
        pass
