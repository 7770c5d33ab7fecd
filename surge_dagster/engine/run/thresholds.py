"""The thresholds between which a SuperBatch is gathered: as given, and with every missing value
derived."""

from __future__ import annotations

from dataclasses import dataclass

from surge_dagster.engine.encoder.speed import RAMP
from surge_dagster.engine.errors import ConfigError

# Each partition counts this much in addition to its rows, so that many empty partitions also end a
# SuperBatch.
PARTITION_OVERHEAD_BYTES = 1024
# The paper's B_max is five times its B_min. Twice takes less memory, and the same whether the
# largest partition has two pieces or many; a partition in pieces has its vectors written twice, so
# ones of a few thousand texts stay whole.
_B_MAX_FACTOR = 2
_LEAST_B_MAX = 5_000
_BYTES_PER_TEXT = 512
_LEAST_B_MAX_BYTES = 32 * 1024 * 1024
_SCALED_B_MAX_BYTES = 8 * 1024 * 1024  # scaling stops here: a text of 4 MiB still has to fit


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The two thresholds of a SuperBatch in texts; None is derived, and so are the same two in
    bytes.

    Attributes:
        b_min: efficiency threshold; flush at the first partition end at or past it.
        b_max: safety threshold; a SuperBatch never exceeds it.
        max_text_bytes: longest text of the source; a SuperBatch has room for a row of twice that.
        first_b_min: efficiency threshold of the first SuperBatch, which doubles up to `b_min`; None
            is a sixteenth of a derived `b_min`, and a given `b_min` itself.
    """

    b_min: int | None = None
    b_max: int | None = None
    max_text_bytes: int = 0
    first_b_min: int | None = None

    def resolve(self, derived_b_min: int, scale: float = 1.0) -> Bounds:
        """Fill in the missing values: B_min from the pool's speed, and B_max as twice that, at
        least 5,000.

        A derived B_min is reached in steps: the first SuperBatch ends at a sixteenth of it and each
        later one at twice the one before. The first files appear early even in a short run, for
        four encode calls more.

        Args:
            derived_b_min: used if no B_min is given (`Speed.b_min`).
            scale: makes derived values smaller where memory is short, 0 to 1.

        Raises:
            ConfigError: a threshold is below 1, or B_min is above B_max.
        """
        for name in ("b_min", "b_max", "first_b_min"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1; {value} was given.")
        b_min = self.b_min or derived_b_min
        b_max = self.b_max or max(_LEAST_B_MAX, _B_MAX_FACTOR * b_min)
        least_bytes = max(_SCALED_B_MAX_BYTES, 2 * self.max_text_bytes + PARTITION_OVERHEAD_BYTES)
        b_max_bytes = max(_LEAST_B_MAX_BYTES, least_bytes, _BYTES_PER_TEXT * b_max)
        b_max_bytes = max(least_bytes, int(scale * b_max_bytes))
        if self.b_max is None:
            b_max = max(1, self.b_min or 0, int(scale * b_max))
        if self.b_min is None:
            b_min = max(1, min(b_min, b_max // _B_MAX_FACTOR))
        if b_min > b_max:
            raise ConfigError(
                f"b_min ({b_min:,} texts) must not exceed b_max ({b_max:,}). Lower b_min or raise "
                "b_max."
            )
        derived_first = b_min if self.b_min is not None else max(1, b_min // RAMP)
        first = min(b_min, self.first_b_min or derived_first)
        return Bounds(b_min, b_max, b_max_bytes // _B_MAX_FACTOR, b_max_bytes, first)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Thresholds with nothing left to derive, in texts and in bytes of ids and texts.

    Attributes:
        first_b_min: as in `Thresholds`; None means `b_min` from the start.
    """

    b_min: int
    b_max: int
    b_min_bytes: int
    b_max_bytes: int
    first_b_min: int | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of one SuperBatch, with the overhead of the partition that is being read."""
        return self.b_max_bytes + PARTITION_OVERHEAD_BYTES

    def b_min_of(self, index: int) -> int:
        """Return the efficiency threshold of a SuperBatch by its number."""
        if self.first_b_min is None:
            return self.b_min
        return min(self.b_min, self.first_b_min << min(index, 32))
