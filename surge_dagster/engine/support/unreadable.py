"""Errors of files that cannot be read: whether the content is damaged, or the system did not give
it.

An error of the operating system has an errno; for damaged content pyarrow raises an `OSError`
without one, or its own error. A failing disk, a mount that does not answer or a missing permission
does not make a file damaged.

Two things are not obvious. A message that quotes a damaged name may not decode and comes as a
`UnicodeDecodeError`; a path that is not UTF-8 is not even opened and comes as a
`UnicodeEncodeError`. And reading the facts of a column in a damaged footer
(`metadata.row_group(i).column(j)`) can end the whole process, from C++: read them only after the
file's pages.
"""

from __future__ import annotations

import errno
import os
from typing import TypeGuard

import pyarrow as pa

from surge_dagster.engine.errors import TransientError

UNREADABLE = (OSError, pa.ArrowException, UnicodeError)

_GIVE_RIGHT = "Give the user that runs this the right to read it, then run again."
_RAISE_LIMIT = "Raise the limit of open files, then run again."
_REMEDIES = {
    errno.EACCES: _GIVE_RIGHT,
    errno.EPERM: _GIVE_RIGHT,
    errno.EMFILE: _RAISE_LIMIT,
    errno.ENFILE: _RAISE_LIMIT,
}


def is_systems(error: BaseException) -> TypeGuard[OSError]:
    """Return whether the operating system did not give the file, so that its content is unknown."""
    return isinstance(error, OSError) and error.errno is not None


def not_given(what: str, error: OSError, key: str | None = None) -> TransientError:
    """Return the error to raise if `is_systems` holds: the system's message, and what to do."""
    code = error.errno or 0
    said = f"{os.strerror(code)}. {_REMEDIES.get(code, 'Run again when its storage answers.')}"
    where = "" if key is None else f"partition {key!r}: "
    return TransientError(f"{where}{what} could not be read: {said}", key)
