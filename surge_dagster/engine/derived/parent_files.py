"""The files of a space that another one is derived from: which of them can be used, their rows, the ranges of int8."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, StoreUnavailable, TransientError
from surge_dagster.engine.files.conversion import cut
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import SUFFIXES, PublishedFile, file_name, open_output_file
from surge_dagster.engine.files.rows import check_schema, matrix_of
from surge_dagster.engine.model.derivation import Ranges
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Found, replaced
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import decode_key
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems, not_given

log = logging.getLogger(__name__)

_BATCH_ROWS = 1024
_EMBED_AGAIN = "Remove it and embed the partition again (`surge-dagster embed`), then derive again."


def rows_version_of(file: PublishedFile) -> str:
    """What names the present rows of a file: their version, or where it has none, its digest, size and tag."""
    stored = f"{file.facts.content_digest} {file.stored.size} {file.stored.etag}".encode()
    return file.facts.rows_version or hashlib.blake2b(stored, digest_size=16).hexdigest()


def usable_file(store: Store, parent: Space, name: str, found: Found | TransientError) -> PublishedFile:
    """A file of the parent that is valid and in its own place.

    Raises:
        DataError: it is damaged, or the file of another partition or space.
        TransientError: it was replaced since it was listed, or cannot be read now.
    """
    location = store.location(name)
    if isinstance(found, PublishedFile):
        facts = found.facts
        if facts.space == parent.name and file_name(parent.name, facts.partition_key, parent.file_format) == name:
            return found
        reason = f"it is that of partition {facts.partition_key!r} in the space {facts.space!r}"
    else:
        reason = first_line(found)
    encoded = name.removeprefix(f"{parent.name}/").removesuffix(SUFFIXES[parent.file_format])
    try:
        key = decode_key(encoded) or encoded
    except ValueError:
        key = encoded
    if isinstance(found, FileNotFoundError):
        raise replaced(location, key)
    if isinstance(found, TransientError):
        raise TransientError(f"partition {key!r}: {found}", key)
    raise DataError(key, f"its file {location!r} cannot be used: {reason}", _EMBED_AGAIN)


def parent_rows(
    store: Store, parent: Space, file: PublishedFile, columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a file as it was listed, `columns` of them, compared with their checksums.

    Raises:
        DataError: the file is damaged.
        TransientError: it was replaced since it was listed, or cannot be read now.
    """
    key, location = file.facts.partition_key, store.location(file.stored.name)
    try:
        with (
            store.open(file.stored.name, file.stored) as source,
            open_output_file(source, parent.file_format, mapped=True) as reader,
        ):
            if reader.facts != file.facts:  # a store may give one tag to two contents
                raise replaced(location, key)
            check_schema(reader.columns, dimension=parent.dimension, dtype=parent.dtype)
            yield from (batch for batch in reader.read(columns=columns, batch_rows=_BATCH_ROWS) if batch.num_rows)
    except FileNotFoundError as error:
        raise replaced(location, key) from error
    except (InvalidFile, *UNREADABLE) as error:
        if is_systems(error):
            raise not_given(repr(location), error, key) from error
        raise DataError(key, f"its file {location!r} is damaged: {first_line(error)}", _EMBED_AGAIN) from error


def find_ranges(
    store: Store, parent: Space, wanted: Space, files: Iterable[PublishedFile], threads: int
) -> tuple[Ranges, int]:
    """The smallest and the largest value of each dimension over all vectors, and the number of vectors.

    Args:
        wanted: the space that is to be derived, still without ranges.

    Raises:
        ConfigError: there are no vectors; files that are damaged or cannot be read now are left out.
        StoreUnavailable: the store does not answer.
    """

    def of_file(file: PublishedFile) -> np.ndarray | None:
        found = np.array([[np.inf], [-np.inf]], np.float32).repeat(wanted.dimension, 1)
        try:
            for batch in parent_rows(store, parent, file, ["embedding"]):
                vectors = cut(matrix_of(batch), wanted)
                np.minimum(found[0], vectors.min(0), out=found[0])
                np.maximum(found[1], vectors.max(0), out=found[1])
        except StoreUnavailable:
            raise
        except (DataError, TransientError) as error:
            log.warning("the ranges of int8 are found without this partition, whose values may be clipped: %s", error)
            return None
        return found

    filled = [file for file in files if file.facts.rows]
    with ThreadPoolExecutor(threads, thread_name_prefix="surge-derive") as pool:
        ranges = zip(filled, pool.map(of_file, filled), strict=True)
        found = [(each, file.facts.rows) for file, each in ranges if each is not None]
    if not found:
        raise ConfigError(
            f"the space {parent.name} holds no vectors to find the ranges of int8 in. Embed first "
            "(`surge-dagster embed`), then derive."
        )
    least = np.min([each[0] for each, _ in found], axis=0)
    most = np.max([each[1] for each, _ in found], axis=0)
    return (tuple(least.tolist()), tuple(most.tolist())), sum(rows for _, rows in found)
