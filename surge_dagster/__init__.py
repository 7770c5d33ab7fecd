"""surge-dagster: embeddings for partitioned catalogs, as a Dagster project on the SURGE engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from surge_dagster.version import __version__

if TYPE_CHECKING:
    from surge_dagster.assets.embeddings_input import EmbeddingsInput
    from surge_dagster.automation.alerts import failure_text
    from surge_dagster.component import EmbeddingCatalog
    from surge_dagster.definitions import embedding_catalog
    from surge_dagster.engine.encoder.pool import EncoderPool
    from surge_dagster.engine.errors import ConfigError, EncoderError, SurgeError, TransientError
    from surge_dagster.engine.feed.changes import Changes, changes
    from surge_dagster.engine.model.spec import EncodingSpec
    from surge_dagster.engine.plan.planned_run import plan
    from surge_dagster.engine.readers.loading import Embeddings, open_embeddings
    from surge_dagster.engine.readers.search import search
    from surge_dagster.engine.run.embedding_run import EmbeddingRun
    from surge_dagster.engine.run.report import Failure, Receipt, RunReport
    from surge_dagster.engine.store import open_store
    from surge_dagster.engine.tables.frames import FrameCatalog, FrameTable
    from surge_dagster.engine.tables.opening import open_source
    from surge_dagster.engine.verify.verification import verify
    from surge_dagster.local_run import DeletionRefused, PartitionsFailed, embed
    from surge_dagster.resources import CatalogSource, EncoderResource, OutputStore

# Imported on first use: every process of a pool imports this package, and the engine runs where
# there is no Dagster.
_HOMES = {
    "CatalogSource": "resources",
    "Changes": "engine.feed.changes",
    "ConfigError": "engine.errors",
    "EmbeddingCatalog": "component",
    "EmbeddingRun": "engine.run.embedding_run",
    "Embeddings": "engine.readers.loading",
    "EmbeddingsInput": "assets.embeddings_input",
    "EncoderError": "engine.errors",
    "EncoderPool": "engine.encoder.pool",
    "EncoderResource": "resources",
    "EncodingSpec": "engine.model.spec",
    "Failure": "engine.run.report",
    "FrameCatalog": "engine.tables.frames",
    "FrameTable": "engine.tables.frames",
    "OutputStore": "resources",
    "DeletionRefused": "local_run",
    "PartitionsFailed": "local_run",
    "Receipt": "engine.run.report",
    "RunReport": "engine.run.report",
    "SurgeError": "engine.errors",
    "TransientError": "engine.errors",
    "changes": "engine.feed.changes",
    "embed": "local_run",
    "embedding_catalog": "definitions",
    "failure_text": "automation.alerts",
    "open_embeddings": "engine.readers.loading",
    "open_source": "engine.tables.opening",
    "open_store": "engine.store",
    "plan": "engine.plan.planned_run",
    "search": "engine.readers.search",
    "verify": "engine.verify.verification",
}
__all__ = [
    "CatalogSource",
    "Changes",
    "ConfigError",
    "DeletionRefused",
    "EmbeddingCatalog",
    "EmbeddingRun",
    "Embeddings",
    "EmbeddingsInput",
    "EncoderError",
    "EncoderPool",
    "EncoderResource",
    "EncodingSpec",
    "Failure",
    "FrameCatalog",
    "FrameTable",
    "OutputStore",
    "PartitionsFailed",
    "Receipt",
    "RunReport",
    "SurgeError",
    "TransientError",
    "__version__",
    "changes",
    "embed",
    "embedding_catalog",
    "failure_text",
    "open_embeddings",
    "open_source",
    "open_store",
    "plan",
    "search",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})  # where Dagster's tools look for components
