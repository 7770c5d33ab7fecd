"""Embeddings as the input of other assets.

An asset with the argument `embeddings` gets the vectors of its run's partitions; one without
partitions gets all:

    @dg.asset
    def near_duplicates(embeddings: pl.LazyFrame) -> None: ...

The asset `embeddings` names `embeddings_input` as its IO manager, so the argument need not.

The argument's type is one of `polars.LazyFrame`, `pyarrow.dataset.Dataset` and `Embeddings`, which
gives both. Only footers are read before the asset reads rows.
"""
# Dagster reads annotations when it makes a resource, so they must not be strings here.

from typing import Any, NoReturn

import dagster as dg

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.feed.changes import Changes, changes
from surge_dagster.engine.readers.loading import Embeddings, open_embeddings
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.orchestration.partition_keys import from_partition_key
from surge_dagster.resources import OutputStore


class EmbeddingsInput(dg.ConfigurableIOManager):
    """Loads embeddings; it does not write.

    Without `space` it reads the output's current space, or its only one.
    """

    output: OutputStore
    space: str | None = None

    def load_input(self, context: dg.InputContext) -> Any:
        """Return the partitions of the run, as the type of the asset's argument."""
        import polars as pl  # with pyarrow's datasets 0.7 s, in every process of Dagster
        import pyarrow.dataset as ds

        wanted = context.dagster_type.typing_type
        if wanted not in (Any, pl.LazyFrame, ds.Dataset, Embeddings):
            raise dg.Failure(
                f"the input {context.name!r} is of type {wanted}; embeddings come as "
                "polars.LazyFrame, pyarrow.dataset.Dataset or surge_dagster.Embeddings. "
                "Change its annotation.",
                allow_retries=False,
            )
        try:
            opened = open_embeddings(self.output.open(), self.space)
            partitions = self._partitions(context, opened)
            read = opened.keys() if partitions is None else partitions
            context.log.info(f"{counted(len(read), 'partition')} of {opened.space.name}")
            if wanted is Embeddings:
                return opened
            if wanted is ds.Dataset:
                return opened.dataset(partitions)
            return opened.lazy(partitions)
        except (ConfigError, DataError) as error:
            raise dg.Failure(str(error), allow_retries=False) from error

    def handle_output(self, context: dg.OutputContext, obj: Any) -> NoReturn:
        """Refused: only runs write embeddings."""
        raise dg.Failure(
            f"{context.name!r} cannot be written by this input manager, which only reads. Give "
            "the asset another io_manager_key; this one is for AssetIn(input_manager_key=...).",
            allow_retries=False,
        )

    def _partitions(self, context: dg.InputContext, opened: Embeddings) -> list[str] | None:
        """Return the keys of the run's partitions; None for an asset without partitions."""
        if not context.has_asset_partitions:
            return None
        keys = [from_partition_key(key) for key in context.asset_partition_keys]
        if context.step_context.entity_partitions_def is not None:
            return keys
        embedded = set(opened.keys())
        missing = [key for key in keys if key not in embedded]
        if missing:
            listed = named(map(repr, missing))
            context.log.warning(
                f"{counted(len(missing), 'partition')} without embeddings left out: {listed}"
            )
        return None


class ChangesInput(EmbeddingsInput):
    """Opens the change feed of the embeddings for a `consumer`, by default the asset's op; it does
    not write."""

    consumer: str | None = None

    def load_input(self, context: dg.InputContext) -> Changes:
        """Return what the asset has not confirmed yet."""
        try:
            return changes(
                self.output.open(), self.consumer or context.op_def.name, space=self.space
            )
        except (ConfigError, DataError) as error:
            raise dg.Failure(str(error), allow_retries=False) from error
