"""What pyarrow raises for a damaged Parquet file, and what of it is worth telling.

Two things are not obvious. A message that quotes a damaged name may not decode, and comes as a `UnicodeDecodeError`;
a path that is not UTF-8 is not even looked for, and comes as a `UnicodeEncodeError`. And the figures of a column in a
damaged footer (`metadata.row_group(i).column(j)`) can end the whole process, from C++: they are looked at only after
the file's pages were read.
"""

from __future__ import annotations

import pyarrow as pa

UNREADABLE = (OSError, pa.ArrowException, UnicodeError)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
