"""What can go wrong, as types: who is to blame decides what happens next.

`DataError` is the fault of one partition: that partition fails, the others go on, nothing is retried.
`ConfigError` is the fault of the call: it is refused before work starts.
`TransientError` may go away by itself: the only kind that a retry can help.
`EncoderError` says that the encoder pool cannot go on.
"""

from __future__ import annotations


class SurgeError(Exception):
    """Base of every error that this project raises on purpose; its text is written for the person who runs it."""


class ConfigError(SurgeError):
    """A setting, a path or a model is wrong: refused before any work starts."""


class DataError(SurgeError):
    """One partition's data is wrong: the partition is refused, is never published, and is not retried.

    Args:
        key: the partition.
        reason: what was expected and what came.
        remedy: what to do next.
        row: zero-based row in the partition's own order, where one row is at fault.
    """

    def __init__(self, key: str, reason: str, remedy: str, row: int | None = None) -> None:
        self.key = key
        self.reason = reason
        self.remedy = remedy
        self.row = row
        where = f"partition {key!r}" if row is None else f"partition {key!r}, row {row}"
        super().__init__(f"{where}: {reason}. {remedy}")


class PlaceTaken(DataError):
    """Nothing is wrong with the partition: where its file belongs lies one that is not this run's to replace."""


class TransientError(SurgeError):
    """A condition outside the data, such as a source that changed while it was read: trying again can help.

    Args:
        key: the partition it struck, or None where it struck the whole run.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        self.key = key
        super().__init__(message)


class StoreUnavailable(TransientError):
    """The output's store answers nobody: the run ends, what was published stays, and a later run goes on."""


class EncoderError(SurgeError):
    """The encoder pool failed for good; the message holds the last output of the failed worker."""


class Cancelled(Exception):
    """A wait was given up because the run is stopping; never seen by a user."""
