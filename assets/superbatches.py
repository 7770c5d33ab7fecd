"""One event per SuperBatch: what an encode call held and what it cost; and one per run, with pictures of all of them.

The asset is external and unpartitioned, and the run of `embeddings` logs its events: as a second output of that op it
would make backfills from the UI impossible, since one asset has partitions and the other has none. Its data version is
the vector space, so a SuperBatch more does not make embeddings stale and another model does.
"""

from __future__ import annotations

from typing import Any

import dagster as dg

from surge_dagster.assets.source_partitions import DATA_VERSION_TAG
from surge_dagster.engine.report import RunReport, SuperBatchReport
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.run_charts import run_pictures
from surge_dagster.orchestration.run_findings import RunFindings

_WHERE_MEASURED = ("pace_ratio", "gpu_utilisation", "gpu_memory_bytes")


def superbatches(names: CatalogNames) -> dg.AssetSpec:
    """The asset with an event per SuperBatch."""
    return dg.AssetSpec(
        names.superbatches,
        deps=[names.source_partitions],
        group_name=names.group,
        kinds={"arrow"},
        description=(
            "What went into the encoder at once: many small partitions together, or a piece of a large one. One event "
            "per SuperBatch, with its figures, and one at the end of each run, with pictures; its data version is the "
            "vector space."
        ),
    )


def materialization(names: CatalogNames, report: SuperBatchReport, space: str) -> dg.AssetMaterialization:
    """The event of one SuperBatch."""
    return dg.AssetMaterialization(
        names.superbatches,
        description=f"SuperBatch {report.index}: {report.texts:,} texts of {report.partitions:,} partitions",
        metadata={
            "superbatch": report.index,
            "partitions": report.partitions,
            "texts": report.texts,
            "text_bytes": report.text_bytes,
            "tokens": report.tokens,
            "padding_ratio": round(report.padding_ratio, 4),
            "truncated": report.truncated,
            "encode_seconds": round(report.encode_seconds, 4),
            "tokenize_seconds": round(report.tokenize_seconds, 4),
            "forward_seconds": round(report.forward_seconds, 4),
            "copy_seconds": round(report.copy_seconds, 4),
            "duty_cycle": round(report.duty_cycle, 4),
            "worker_idle_ratio": round(report.worker_idle_ratio, 4),
            "compute_intensity": round(report.compute_intensity, 4),
            "replays": report.replays,
            "serialize_seconds": round(report.serialize_seconds, 4),
            "upload_seconds": round(report.upload_seconds, 4),
            "fill_ratio": round(report.fill_ratio, 4),
            "overlap_ratio": round(report.overlap_ratio, 4),
            "texts_per_second": round(report.texts_per_second, 1),
            "peak_resident_bytes": report.peak_resident_bytes,
            "space": space,
        }
        | {name: value for name in _WHERE_MEASURED if (value := getattr(report, name)) is not None},
        tags=_tags(space),
    )


def materialization_of_run(names: CatalogNames, report: RunReport, findings: RunFindings) -> dg.AssetMaterialization:
    """The event behind those of a run's SuperBatches: pictures of them. Figures have other names than theirs.

    Dagster plots every number over all events of an asset, and a run's would stand among those of SuperBatches.
    """
    return dg.AssetMaterialization(
        names.superbatches,
        description=f"Run: {report.superbatches:,} SuperBatches with {report.texts_encoded:,} texts",
        metadata={
            **run_pictures(report, findings),
            "superbatches": report.superbatches,
            "partitions_written": report.partitions_written,
            "texts_encoded": report.texts_encoded,
            "space": report.space,
        },
        tags=_tags(report.space),
    )


def figures_of(event: dg.AssetMaterialization) -> dict[str, Any] | None:
    """The figures of a SuperBatch's event, None of the event of a whole run."""
    figures = {name: value.value for name, value in event.metadata.items()}
    return figures if "superbatch" in figures else None


def _tags(space: str) -> dict[str, str]:
    return {DATA_VERSION_TAG: space, "dagster/data_version_is_user_provided": "true"}
