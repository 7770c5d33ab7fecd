"""Assets that take embeddings as an input get those of their run, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dagster as dg
import polars as pl
import pyarrow.dataset as ds
import pytest

from surge_dagster import Embeddings
from surge_dagster.assets.embeddings_input import EmbeddingsInput
from surge_dagster.engine.output.current_space import write_current
from surge_dagster.resources import OutputStore
from tests.dagster.conftest import INS, NAMES, Ran, Workbench, execute, range_tags
from tests.spaces import Spaces

NO_MANAGER = {"embeddings": dg.AssetIn(key=NAMES.embeddings)}


class Downstream:
    """An asset after `embeddings`, with or without the catalog's partitions; keeps what it was
    given."""

    def __init__(
        self,
        bench: Workbench,
        annotation: Any = pl.LazyFrame,
        *,
        partitioned: bool = False,
        ins: dict[str, dg.AssetIn] = INS,
        seen: Callable[[Any], Any] | None = None,
    ) -> None:
        self.given: list[Any] = []
        self._bench = bench

        def near_duplicates(embeddings: Any) -> dg.MaterializeResult:
            self.given.append((seen or self.rows_in)(embeddings))
            return dg.MaterializeResult(metadata={"rows": len(self.given[-1])})

        near_duplicates.__annotations__["embeddings"] = annotation
        self.asset = dg.asset(
            ins=ins,
            partitions_def=NAMES.partitions if partitioned else None,
            backfill_policy=dg.BackfillPolicy.single_run() if partitioned else None,
        )(near_duplicates)

    @staticmethod
    def rows_in(embeddings: Any) -> list[tuple[str, str]]:
        """Partition and id of each row."""
        if isinstance(embeddings, Embeddings):
            embeddings = embeddings.lazy()
        if isinstance(embeddings, ds.Dataset):
            return [(row["partition"], row["id"]) for row in embeddings.to_table().to_pylist()]
        return embeddings.select("partition", "id").collect().rows()

    def run(self, tags: dict[str, str] | None = None, **resources: Any) -> Ran:
        """Materialize it in a run of its own."""
        job = dg.define_asset_job(
            "downstream", selection=dg.AssetSelection.assets("near_duplicates")
        )
        mine = dg.Definitions(assets=[self.asset], jobs=[job])
        definitions = dg.Definitions.merge(self._bench.definitions, mine)
        if resources:
            given = {**(definitions.resources or {}), **resources}
            definitions = dg.Definitions(assets=definitions.assets, jobs=[job], resources=given)
        return execute(self._bench.instance, definitions.resolve_job_def("downstream"), tags=tags)


@pytest.fixture
def embedded(bench: Workbench) -> Workbench:
    """Three partitions of two rows, embedded; one has a key that Dagster does not take as it is."""
    bench.fill(("a", "b, 50%", "c"), 2)
    assert bench.refresh().success
    return bench


EVERYTHING = [(key, f"id-{row}") for key in ("a", "b, 50%", "c") for row in (0, 1)]


def test_an_asset_without_partitions_gets_everything_as_the_type_it_names(
    embedded: Workbench,
) -> None:
    for annotation in (pl.LazyFrame, ds.Dataset, Embeddings, Any):
        downstream = Downstream(embedded, annotation)
        assert downstream.run().success
        assert [sorted(rows) for rows in downstream.given] == [EVERYTHING]


@pytest.mark.parametrize("partitioned", [False, True])
def test_argument_embeddings_is_loaded_without_naming_an_io_manager(
    embedded: Workbench, partitioned: bool
) -> None:
    downstream = Downstream(embedded, partitioned=partitioned, ins=NO_MANAGER)

    ran = downstream.run({"dagster/partition": "a"} if partitioned else None)

    assert ran.success
    assert [sorted(rows) for rows in downstream.given] == [
        EVERYTHING[:2] if partitioned else EVERYTHING
    ]


def test_an_asset_with_the_catalogs_partitions_gets_those_of_its_run(embedded: Workbench) -> None:
    downstream = Downstream(embedded, partitioned=True)

    registered = embedded.instance.get_dynamic_partitions("catalog")

    assert downstream.run({"dagster/partition": "b%2C 50%25"}).success
    assert downstream.run(range_tags(*registered[:2])).success
    assert downstream.given[0] == [("b, 50%", "id-0"), ("b, 50%", "id-1")]
    assert len(downstream.given[1]) == 4
    assert len({partition for partition, _ in downstream.given[1]}) == 2


def test_partition_without_embeddings_ends_its_own_run(embedded: Workbench) -> None:
    embedded.file("a").unlink()

    refused = Downstream(embedded, partitioned=True).run({"dagster/partition": "a"})

    assert not refused.success
    assert "no embeddings of 'a'. Embed them first" in refused.failure()
    assert refused.count(dg.DagsterEventType.STEP_UP_FOR_RETRY) == 0


def test_asset_without_partitions_gets_those_that_are_embedded(embedded: Workbench) -> None:
    embedded.file("a").unlink()

    everything = Downstream(embedded)

    assert everything.run().success

    assert everything.given == [EVERYTHING[2:]]


def test_current_space_is_loaded_unless_another_is_named(
    bench: Workbench, three_spaces: Spaces
) -> None:
    """Whatever the settings mean; where none is current none is chosen."""
    nothing = Downstream(bench).run()

    assert not nothing.success
    assert "holds no embeddings" in nothing.failure()

    made = three_spaces.copy_to(bench.root)
    first, second, _ = made.names()
    bench.settings["model"] = "hash://8"

    unclear = Downstream(bench).run()

    assert not unclear.success
    assert first in unclear.failure()
    assert second in unclear.failure()
    assert "several spaces" in unclear.failure()

    write_current(made.store, second, seen=None)

    downstream = Downstream(bench, Embeddings, seen=lambda given: given.space.name)

    assert downstream.run().success

    output = OutputStore(url=str(bench.output), include_text=True)
    assert downstream.run(embeddings_input=EmbeddingsInput(output=output, space=first)).success
    assert downstream.given == [second, first]


def test_unsupported_input_type_and_unusable_output_are_refused(bench: Workbench) -> None:
    frame = Downstream(bench, pl.DataFrame).run()

    assert not frame.success
    assert (
        "come as polars.LazyFrame, pyarrow.dataset.Dataset or surge_dagster.Embeddings"
        in frame.failure()
    )

    def near_duplicates() -> int:
        return 1

    writing = Downstream(bench)
    writing.asset = dg.asset(io_manager_key="embeddings_input")(near_duplicates)

    written = writing.run()

    assert not written.success
    assert "which only reads" in written.failure()
