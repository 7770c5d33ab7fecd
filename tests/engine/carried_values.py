"""Three different values of each Arrow type."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

NAN = float("nan")

# What files carry.
VALUES: dict[str, Any] = {
    "bool": pa.array([None, True, False]),
    "int8": pa.array([-128, 127, None], pa.int8()),
    "int16": pa.array([-(2**15), 1, None], pa.int16()),
    "int32": pa.array([-(2**31), 1, None], pa.int32()),
    "int64": pa.array([-(2**63), 2**63 - 1, None]),
    "uint8": pa.array([0, 255, None], pa.uint8()),
    "uint16": pa.array([0, 65_535, None], pa.uint16()),
    "uint32": pa.array([0, 2**32 - 1, None], pa.uint32()),
    "uint64": pa.array([0, 2**64 - 1, None], pa.uint64()),
    "float16": pa.array(np.array([1, NAN, 3], np.float16)),
    "float32": pa.array([NAN, 1, None], pa.float32()),
    "float64": pa.array([1.0, 0.0, -0.0]),
    "decimal128": pa.array([Decimal("1.10"), Decimal("1.11"), None]),
    "decimal256": pa.array([Decimal("1.10"), Decimal("-1.10"), None], pa.decimal256(60, 2)),
    "date32": pa.array([date(1, 1, 1), date(9999, 12, 31), None]),
    "date64": pa.array([date(1970, 1, 1), date(2026, 2, 3), None], pa.date64()),
    "time32": pa.array([0, 1, None], pa.time32("ms")),
    "time64": pa.array([0, 1, None], pa.time64("us")),
    "timestamp of seconds": pa.array([0, 1, None], pa.timestamp("s")),
    "timestamp": pa.array([-(2**62), 2**62, None], pa.timestamp("ns", "Europe/Paris")),
    "duration": pa.array([0, 1, None], pa.duration("ms")),
    "string": pa.array(["", "ü", None]),
    "large string": pa.array(["", "ü", None], pa.large_string()),
    "binary": pa.array([b"", b"\xff", None]),
    "large binary": pa.array([b"", b"\xff", None], pa.large_binary()),
    "fixed binary": pa.array([b"ab", b"cd", None], pa.binary(2)),
    "category": pa.array(["x", "y", None]).dictionary_encode(),
    "uuid": pa.array([bytes(16), b"x" * 16, None], pa.binary(16)).cast(pa.uuid()),
    "json": pa.array(["1", "{}", None]).cast(pa.json_()),
    "list": pa.array([[], [1, None], None]),
    "large list": pa.array([["a"], ["b"], []], pa.large_list(pa.string())),
    "fixed list": pa.array([[1.0, NAN], [NAN, 1.0], None], pa.list_(pa.float64(), 2)),
    "list of lists": pa.array([[[1]], [[], [1]], [None]]),
    "struct": pa.array([{"a": NAN, "b": "x"}, {"a": NAN, "b": "y"}, None]),
    "list of structs": pa.array([[{"a": [1]}], [{"a": [2]}], [{"a": None}]]),
}
