"""The change feed as the input of other assets:

    @dg.asset(ins={"changes": dg.AssetIn("embeddings", input_manager_key="changes")})
    def search_index(changes: Changes) -> None:
        for partition in changes:
            for batch in partition:
                ...
        changes.confirm()

The consumer's name is that of the asset's op, so that each asset gets what it has not confirmed
yet.
"""
# Dagster reads annotations when it makes a resource, so they must not be strings here.

import dagster as dg

from surge_dagster.assets.embeddings_input import EmbeddingsInput
from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.feed.changes import Changes, changes


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
