"""Why the service does not answer a request: each error says what a client can do about it."""

from __future__ import annotations

import reprlib

from surge_dagster.engine.errors import SurgeError


class NotNow(SurgeError):
    """Not answered now; `retry_after_seconds` says when another attempt is worth it."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(NotNow):
    """The request could not be answered in time."""


class RequestTooLarge(SurgeError):
    """An idle lane could not answer the request within the promise either, or a text has too many bytes."""


class TooLong(SurgeError):
    """Texts are longer than the model reads.

    Attributes:
        rows: of these texts in the request.
    """

    def __init__(self, rows: list[int], limit: int) -> None:
        shown = ", ".join(map(str, rows[:10])) + (", …" if len(rows) > 10 else "")
        which = f"row {shown} of the request has" if len(rows) == 1 else f"rows {shown} of the request have"
        super().__init__(
            f"the model reads {limit:,} tokens of a text, prompt and special ones included, and {which} more; shorten "
            "or split such texts, or allow truncation"
        )
        self.rows = rows


class UnusableText(SurgeError):
    """A text of the request cannot be encoded, whatever is tried: `row` says which one."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row} of the request cannot be encoded: {reason}")
        self.row = row


class LaneDown(SurgeError):
    """The encoder pool of the lane failed: no worker encodes any more."""


class LaneClosed(SurgeError):
    """The lane takes no more requests, or ended before this one was answered: the service stops, or left the space."""


class SpaceLoading(NotNow):
    """The model of the space is being loaded."""


class UnknownSpace(SurgeError):
    """No space that is served has this name; `names` lists what is answered."""

    def __init__(self, model: str, names: list[str]) -> None:
        super().__init__(f"the model {reprlib.repr(model)} is not served; expected one of {', '.join(names)}")
        self.names = names
