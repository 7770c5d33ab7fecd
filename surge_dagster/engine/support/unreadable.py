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

_REMEDIES = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "Give the user that runs this the right to read it, then run again.",
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files, then run again."),
}


def is_systems(error: BaseException) -> TypeGuard[OSError]:
    """Whether the operating system did not give the file, so that nothing is known of its content."""
    return isinstance(error, OSError) and error.errno is not None


def not_given(what: str, error: OSError, key: str | None = None) -> TransientError:
    """The error to raise where `is_systems` holds: the system's message, and what to do."""
    code = error.errno or 0
    said = f"{os.strerror(code)}. {_REMEDIES.get(code, 'Run again when its storage answers.')}"
    where = "" if key is None else f"partition {key!r}: "
    return TransientError(f"{where}{what} could not be read: {said}", key)


def first_line(error: BaseException) -> str:
    """The first line of an error's text as a part of a sentence, or the error's type where it has
    no text."""
    return visible((str(error).splitlines() or [""])[0].rstrip(". ")) or type(error).__name__


def visible(text: str) -> str:
    """The text with characters escaped that cannot be printed: names of files and columns may have
    any."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
