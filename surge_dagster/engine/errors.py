"""The errors of the engine: the type of an error decides what happens next.

`DataError`: one partition is wrong; it fails, the others go on, nothing is retried.
`ConfigError`: the call is wrong; it is refused before work starts.
`TransientError`: the cause may go away by itself; the only kind that is retried.
`EncoderError`: the encoder pool cannot go on.
"""

from __future__ import annotations

from typing import Any


class SurgeError(Exception):
    """Base of every error that this project raises on purpose; its text is written for the
    operator."""

    # a process pool pickles it, whatever arguments it was made with
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self), *self.args), vars(self)


class ConfigError(SurgeError):
    """A setting, a path or a model is wrong: refused before any work starts."""


class DataError(SurgeError):
    """One partition's data is wrong: the partition is refused, is never published, and is not
    retried.

    Args:
        key: the partition.
        reason: what was expected and what came.
        remedy: what to do next.
        row: zero-based row in the partition's own order, if one row is at fault.
        place: where the source has that row, such as "row 5 of part-1.csv", as far as it is known.

    Attributes:
        finding: the error's text without its remedy.
    """

    def __init__(
        self, key: str, reason: str, remedy: str, row: int | None = None, place: str | None = None
    ) -> None:
        self.key = key
        self.reason = reason
        self.remedy = remedy
        self.row = row
        self.place = place
        where = "" if row is None else f", {place or f'row {row:,}'}"
        self.finding = f"partition {key!r}{where}: {reason}."
        super().__init__(f"{self.finding} {remedy}".rstrip())


class PlaceTaken(DataError):
    """The partition is valid, but a file that this run must not replace has its name."""


class TransientError(SurgeError):
    """A condition outside the data, such as a source that changed while it was read; a retry can
    help.

    Args:
        key: the partition that failed, or None if the whole run did.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        self.key = key
        super().__init__(message)


class StoreUnavailable(TransientError):
    """The output's store does not answer or takes no files: the run ends, published files stay, a
    later run goes on."""


class EncoderError(SurgeError):
    """The encoder pool failed for good; the message holds the last output of the failed worker."""


class EndpointDown(EncoderError):
    """The encoder behind HTTP encodes nothing, or what cannot be used: the pool ends, and no worker
    is started again."""


class MaxCostReached(SurgeError):
    """A run has spent what it may: it ends, published files stay, and it is not tried again."""


class Cancelled(Exception):
    """A wait ended because the run is stopping; never shown to the operator."""
