"""surge-dagster: embeddings for partitioned catalogs, as a Dagster project on the SURGE engine."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surge_dagster.component import EmbeddingCatalog
    from surge_dagster.definitions import embedding_catalog
    from surge_dagster.engine.feed.changes import Changes, changes
    from surge_dagster.engine.readers.loading import Embeddings, open_embeddings

__version__ = "0.1.0"
__all__ = [
    "Changes",
    "EmbeddingCatalog",
    "Embeddings",
    "__version__",
    "changes",
    "embedding_catalog",
    "open_embeddings",
]

# Read when pyarrow is imported. Mimalloc, Arrow's own choice, keeps what each thread has freed: over 100 MB in a run,
# and more the longer it takes.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")

# Imported on first use: every process of a pool imports this package, and the engine runs where there is no Dagster.
_HOME = {
    "Changes": "surge_dagster.engine.feed.changes",
    "changes": "surge_dagster.engine.feed.changes",
    "EmbeddingCatalog": "surge_dagster.component",
    "Embeddings": "surge_dagster.engine.readers.loading",
    "embedding_catalog": "surge_dagster.definitions",
    "open_embeddings": "surge_dagster.engine.readers.loading",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})  # where Dagster's tools look for components
