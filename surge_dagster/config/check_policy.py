"""Which asset checks run, how severe they are, and the limits above or below which they fail.

The settings read a policy and the assets follow it; this module imports neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Severity = Literal["error", "warn", "off"]
CheckName = Literal[
    "every_partition_is_embedded",
    "row_counts_match",
    "ids_match",
    "texts_match",
    "files_are_whole",
    "dimensions_match",
    "vectors_are_finite",
    "vectors_have_length_1",
    "one_space",
    "no_orphan_files",
    "few_texts_are_truncated",
    "vectors_have_not_drifted",
    "encode_not_slow",
]
CHECK_NAMES: tuple[CheckName, ...] = get_args(CheckName)
# Every run ends with this check, which shows the run's metrics and failures; so it is never off.
RUN_CHECK = "published_partitions_are_valid"
AnyCheckName = Literal[CheckName, "published_partitions_are_valid"]

# Checks that fail for other reasons than wrong output.
_WARNINGS: frozenset[CheckName] = frozenset(
    {"no_orphan_files", "few_texts_are_truncated", "vectors_have_not_drifted", "encode_not_slow"}
)

MAX_TRUNCATED_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class CheckPolicy:
    """Severities of checks that are not the default, and the share (0 to 1) of texts that may be
    truncated."""

    severities: Mapping[AnyCheckName, Severity] = field(default_factory=dict)
    max_truncated_share: float = MAX_TRUNCATED_SHARE

    def severity(self, name: AnyCheckName) -> Severity:
        return self.severities.get(name, "warn" if name in _WARNINGS else "error")
