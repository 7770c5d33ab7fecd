"""Encoding with the resource: its vectors, who shares its workers, and when they end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import psutil
import pytest

from surge_dagster import EncoderPool, EncoderResource
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.launch import config_of
from tests.dagster.conftest import NAMES, Workbench, execute, range_tags, values_of
from tests.pages import code_blocks

PAGE = Path(__file__).parents[2] / "docs" / "use.md"
DIMENSION = 24  # of a model whose workers no other test keeps
TEXTS = ["steel bottle", "straw hat", "steel bottle", ""]
Pids = list[int]


def resource(**settings: Any) -> EncoderResource:
    given: dict[str, Any] = {"model": f"hash://{DIMENSION}", **settings}
    return EncoderResource(**given)


def workers(encoder: EncoderResource) -> Pids:
    """The process ids of the shared pool's workers; none before it has started."""
    with encoder.pool() as pool:
        return pool.worker_pids


def alive(pids: Pids) -> Pids:
    return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture
def held() -> Iterator[EncoderResource]:
    """A resource whose workers live until the test ends, like those of a run."""
    encoder = resource()
    with encoder.pool():
        yield encoder


@pytest.fixture
def bench(bench: Workbench) -> Workbench:
    """A workbench with the model of these tests."""
    bench.settings["model"] = f"hash://{DIMENSION}"
    return bench


class TestVectors:
    def test_vectors_come_in_the_order_of_their_texts(self) -> None:
        vectors = resource().encode(TEXTS)

        assert vectors.dtype == np.float32
        assert np.array_equal(vectors, hash_vectors(TEXTS, DIMENSION))

    def test_no_texts_give_no_vectors_and_start_no_worker(self, held: EncoderResource) -> None:
        vectors = held.encode([])

        assert vectors.shape == (0, DIMENSION)
        assert workers(held) == []

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (["a", None], r"texts\[1\] is of the type NoneType; expected a str"),
            (["a", 1.5], r"texts\[1\] is of the type float; expected a str"),
            ("steel bottle", "texts is a str. Give a list of texts"),
        ],
    )
    def test_other_texts_are_refused(self, texts: Any, message: str, held: EncoderResource) -> None:
        with pytest.raises(ConfigError, match=message):
            held.encode(texts)

        assert workers(held) == []

    def test_unknown_task_is_refused(self) -> None:
        task: Any = "passage"

        with pytest.raises(ConfigError, match=r"Unknown task 'passage'\. Use document or query"):
            resource().encode(TEXTS, task)


class TestTasks:
    def test_each_task_has_its_prompt(self) -> None:
        encoder = resource(document_prompt="passage: ", query_prompt="query: ")

        document = encoder.encode(["straw hat"])

        query = encoder.encode(["straw hat"], task="query")

        assert np.array_equal(document, hash_vectors(["passage: straw hat"], DIMENSION))
        assert np.array_equal(query, hash_vectors(["query: straw hat"], DIMENSION))

    def test_tasks_with_different_prompts_have_workers_of_their_own(self) -> None:
        encoder = resource(query_prompt="query: ")

        with encoder.pool("document") as documents, encoder.pool("query") as queries:
            assert documents.space.task == "document"
            assert queries.space.task == "query"


class TestSpace:
    def test_space_is_known_without_workers(self, held: EncoderResource) -> None:
        assert held.space.name.startswith(f"hash-{DIMENSION}-")
        assert workers(held) == []

    def test_space_is_known_where_the_devices_are_missing(self) -> None:
        assert resource(devices="cuda:7").space.dimension == DIMENSION


class TestSharing:
    def test_equal_settings_share_workers(self, held: EncoderResource) -> None:
        held.encode(TEXTS)

        assert workers(resource()) == workers(held) != []

    def test_other_settings_do_not_share_workers(self, held: EncoderResource) -> None:
        held.encode(TEXTS)

        assert workers(resource(hang_timeout_seconds=7)) == []


class TestEnd:
    def test_workers_end_with_the_last_of_their_runs(self) -> None:
        with dg.build_resources({"encoder": resource()}) as first:
            with dg.build_resources({"encoder": resource()}) as second:
                second.encoder.encode(TEXTS)
                pids = workers(second.encoder)
            after_one = alive(pids)

            first.encoder.encode(TEXTS)
            shared = workers(first.encoder)

        assert after_one == shared == pids != []
        assert alive(pids) == []

    def test_outside_of_a_run_no_worker_outlives_the_call(self) -> None:
        before = psutil.Process().children(recursive=True)

        resource().encode(TEXTS)

        assert psutil.Process().children(recursive=True) == before


class Assets:
    """Two assets that encode in one run; keeps the workers that each of them had."""

    def __init__(self) -> None:
        self.seen: list[Pids] = []

        @dg.asset
        def first(encoder: EncoderResource) -> None:
            encoder.encode(TEXTS)
            self.seen.append(workers(encoder))

        @dg.asset(deps=[first])
        def second(encoder: EncoderResource) -> None:
            encoder.encode(TEXTS)
            self.seen.append(workers(encoder))
            self.end()

        self.both = [first, second]

    def end(self) -> None:
        """What the second asset does after it has encoded."""

    def run(self, bench: Workbench) -> bool:
        return bench.run_downstream(*self.both).success


class TestRuns:
    def test_assets_of_a_run_share_workers_which_end_with_it(self, bench: Workbench) -> None:
        assets = Assets()

        assert assets.run(bench)

        [first, second] = assets.seen

        assert first == second != []
        assert alive(first) == []

    @pytest.mark.parametrize("error", [RuntimeError("odd"), dg.DagsterExecutionInterruptedError()])
    def test_workers_end_with_a_run_that_ends_early(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        assets = Assets()

        def fail() -> None:
            raise error

        monkeypatch.setattr(assets, "end", fail)

        assert not assets.run(bench)

        assert alive(assets.seen[0]) == []

    def test_embeddings_share_workers(
        self, bench: Workbench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.fill("ab")

        assert bench.refresh().success

        starts = count_starts(monkeypatch)
        assets = Assets()
        definitions = dg.Definitions.merge(bench.definitions, dg.Definitions(assets=assets.both))

        ran = execute(
            bench.instance,
            definitions.resolve_implicit_global_asset_job_def(),
            config_of(NAMES.embeddings_op, {"force": True}),
            range_tags("a", "b"),
            asset_selection=[NAMES.embeddings, *(asset.key for asset in assets.both)],
        )

        assert ran.success
        assert len(ran.materialized()) == 2
        assert len(starts) == 1


def test_examples_of_the_page_run(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    rain = "shoes for rain"
    gift = "a gift for a gardener"
    bench.write("shoes", [("1", rain), ("2", "sandals")])
    bench.write("garden", [("3", gift), ("4", "rake")])

    assert bench.refresh().success

    monkeypatch.setenv("SURGE_SOURCE", "catalog")
    monkeypatch.setenv("SURGE_OUTPUT", "output")
    monkeypatch.setenv("SURGE_MODEL", f"hash://{DIMENSION}")

    section = PAGE.read_text().partition("## Encode your own texts\n")[2].partition("\n## ")[0]
    examples = code_blocks(section, "python")
    own_texts, queries = (run_example(bench, example) for example in examples)

    assert own_texts["category_vectors"]["texts"] == 3
    assert own_texts["category_vectors"]["space"] == bench.space
    assert np.load("category_vectors.npy").shape == (3, DIMENSION)
    assert queries["answers"] == {rain: rain, gift: gift}


def run_example(bench: Workbench, example: str) -> dict[str, dict[str, Any]]:
    """Materialize the asset of an example in a run of its own; returns the metadata by asset."""
    names: dict[str, Any] = {}
    exec(compile(example, PAGE.name, "exec", dont_inherit=True), names)
    [asset] = [value for value in names.values() if isinstance(value, dg.AssetsDefinition)]
    job = names["defs"].resolve_implicit_global_asset_job_def()
    ran = execute(bench.instance, job, asset_selection=[asset.key])
    assert ran.success, ran.failure()
    return {asset.key.path[-1]: values_of(ran.materialized(asset.key)[None])}


def count_starts(monkeypatch: pytest.MonkeyPatch) -> list[EncoderPool]:
    """The pools whose workers start from now on."""
    started: list[EncoderPool] = []
    start = EncoderPool._start_workers

    def noted(pool: EncoderPool) -> Any:
        started.append(pool)
        return start(pool)

    monkeypatch.setattr(EncoderPool, "_start_workers", noted)
    return started
