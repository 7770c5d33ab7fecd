"""Which of the asset checks are made, how seriously they are taken, and from which values on they fail.

A leaf: the settings read a policy, the assets follow it.
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
    "nothing_is_left_over",
    "few_texts_are_truncated",
    "vectors_have_not_drifted",
]
CHECK_NAMES: tuple[CheckName, ...] = get_args(CheckName)
# Ends every run with its figures and the table of what failed, so it has a severity and is never off.
RUN_CHECK = "published_partitions_are_valid"
AnyCheckName = Literal[CheckName, "published_partitions_are_valid"]

# What is no fault of the output itself, but worth a look.
_WARNINGS: frozenset[CheckName] = frozenset(
    {"nothing_is_left_over", "few_texts_are_truncated", "vectors_have_not_drifted"}
)

MAX_TRUNCATED_SHARE = 0.2
# fp16 and bf16 vectors may be 0.999 from those of fp32, so 0.996 from each other at worst.
MIN_PREVIOUS_COSINE = 0.995


@dataclass(frozen=True, slots=True)
class CheckPolicy:
    """How the checks are made.

    Attributes:
        severities: by check, where they are not the usual ones.
        max_truncated_share: of a partition's texts.
        min_previous_cosine: of a text's vector to the one it had, on the mean over a partition's sample.
    """

    severities: Mapping[AnyCheckName, Severity] = field(default_factory=dict)
    max_truncated_share: float = MAX_TRUNCATED_SHARE
    min_previous_cosine: float = MIN_PREVIOUS_COSINE

    def severity(self, name: AnyCheckName) -> Severity:
        """Of one check."""
        return self.severities.get(name, "warn" if name in _WARNINGS else "error")
