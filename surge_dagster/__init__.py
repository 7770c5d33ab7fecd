"""surge-dagster: embeddings for partitioned catalogs, as a Dagster project on the SURGE engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surge_dagster.engine.output.loading import Embeddings, open_embeddings

__version__ = "0.1.0"
__all__ = ["Embeddings", "__version__", "open_embeddings"]


def __getattr__(name: str) -> Any:
    # On first use: every process of a pool imports this package and loads no embeddings.
    if name in ("Embeddings", "open_embeddings"):
        from surge_dagster.engine.output import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
