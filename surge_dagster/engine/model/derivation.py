"""What makes a space a derived one: the space whose vectors it was computed from, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

DerivedDtype = Literal["float32", "float16", "int8", "binary"]
Ranges = tuple[tuple[float, ...], tuple[float, ...]]
DERIVED_DTYPES: tuple[DerivedDtype, ...] = get_args(DerivedDtype)


@dataclass(frozen=True, slots=True)
class Derivation:
    """Where the vectors of a derived space come from; part of the space's identity.

    Attributes:
        parent: name of the space with the float32 vectors, in the same output.
        parent_sha256: that space's `spec_sha256`; its model encodes the queries of a search.
        ranges: of int8 alone: smallest and largest value of each dimension, over all vectors when
            the space was begun. The values are float32 numbers.
    """

    parent: str
    parent_sha256: str
    ranges: Ranges | None = None

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"parent": self.parent, "parent_sha256": self.parent_sha256}
        if self.ranges is not None:
            document["ranges"] = {"min": list(self.ranges[0]), "max": list(self.ranges[1])}
        return document


def derivation_from_json(document: Any) -> Derivation:
    ranges = document.get("ranges")
    if ranges is not None:
        ranges = (tuple(map(float, ranges["min"])), tuple(map(float, ranges["max"])))
    return Derivation(str(document["parent"]), str(document["parent_sha256"]), ranges)
