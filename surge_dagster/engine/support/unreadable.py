"""What is raised for a file that cannot be read, whether that says anything of its content, and what is worth telling.

Who is to blame can be told: what the operating system refuses has an errno, and what pyarrow finds wrong with content
is an `OSError` without one, or its own error. A disk that fails, a mount that does not answer or a missing right makes
no file a damaged one: it is read again some day, as it is.

Two things are not obvious. A message that quotes a damaged name may not decode, and comes as a `UnicodeDecodeError`;
a path that is not UTF-8 is not even looked for, and comes as a `UnicodeEncodeError`. And the figures of a column in a
damaged footer (`metadata.row_group(i).column(j)`) can end the whole process, from C++: they are looked at only after
the file's pages were read.
"""

from __future__ import annotations

import errno
import os
from typing import TypeGuard

import pyarrow as pa

from surge_dagster.engine.errors import TransientError

UNREADABLE = (OSError, pa.ArrowException, UnicodeError)

_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Give whoever runs this the right to read it, then run again."),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files, then run again."),
}


def is_systems(error: BaseException) -> TypeGuard[OSError]:
    """Whether it is the operating system that did not give the file, so that nothing is known of its content."""
    return isinstance(error, OSError) and error.errno is not None


def not_given(what: str, error: OSError, key: str | None = None) -> TransientError:
    """What to raise for an error of which `is_systems` holds: the system's words, and what to do.

    Args:
        what: the file or folder in words.
        key: of its partition, where that is known.
    """
    code = error.errno or 0
    said = f"{os.strerror(code)}. {_REMEDIES.get(code, 'Run again when its storage answers.')}"
    where = "" if key is None else f"partition {key!r}: "
    return TransientError(f"{where}{what} could not be read: {said}", key)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
