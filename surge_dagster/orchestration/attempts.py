"""The metrics of a run over two of its attempts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from surge_dagster.engine.run.report import RunReport

ADDED_UP = (
    *(
        "superbatches",
        "slow_superbatches",
        "partitions_republished",
        "texts_reused",
        "truncated",
        "skipped_rows",
        "blank_texts",
    ),
    *("pool_start_seconds", "wall_seconds", "run_seconds", "exposed_io_seconds"),
)
PEAKS = ("max_in_flight_texts", "peak_resident_bytes", "peak_rss_bytes")
_OF_SPACE = ("space", "space_title", "dimension")
_OF_ENCODER = ("device", "hardware", "precision", "workers", "call_seconds", "b_min", "b_max", "machines")


def combined(before: RunReport, last: RunReport) -> RunReport:
    """Sums of counts and seconds, ratios of the sums, and the highest peaks.

    The encoder, its workers, B_min and B_max are those of the last attempt that had an encoder. Partitions are the last
    attempt's, since the same ones may be in both.
    """
    with_encoder = last if last.device else before
    values: dict[str, Any] = {name: getattr(before, name) + getattr(last, name) for name in ADDED_UP}
    values |= {name: max(getattr(before, name), getattr(last, name)) for name in PEAKS}
    values |= {name: getattr(last, name) or getattr(before, name) for name in _OF_SPACE}
    values |= {name: getattr(with_encoder, name) for name in _OF_ENCODER}
    first_output = before.time_to_first_output_seconds
    attempts = [report for report in (before, last) if report.superbatches]
    predicted = [seconds for report in attempts if (seconds := report.predicted_wall_seconds) is not None]
    return replace(
        last,
        **values,
        costs=before.costs.plus(last.costs),
        predicted_wall_seconds=sum(predicted) if attempts and len(predicted) == len(attempts) else None,
        encoder_notes=list(dict.fromkeys(before.encoder_notes + last.encoder_notes)),
        time_to_first_output_seconds=last.time_to_first_output_seconds if first_output is None else first_output,
        storage_retries=dict(sorted((Counter(before.storage_retries) + Counter(last.storage_retries)).items())),
    )
