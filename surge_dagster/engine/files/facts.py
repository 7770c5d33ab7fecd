"""What an output file states about itself: entries named `surge.*` in its metadata, guarded by a
digest.

Checksums of pages do not cover a file's metadata, so the digest does.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from surge_dagster.engine.support.printable import first_line
from surge_dagster.engine.support.unreadable import UNREADABLE, is_systems, not_given
from surge_dagster.version import __version__

FORMAT = "3"
_FORMAT = b"surge.format"
_METADATA_DIGEST = b"surge.metadata_digest"
WRITER = f"surge-dagster {__version__}"

Flaw = Literal["damaged", "space", "place", "dimension", "rows"]


class InvalidFile(Exception):
    """A file in the output is not a complete, valid file of its format and place.

    Args:
        reason: what is wrong with it, as the end of a sentence.
        flaw: "damaged", or what contradicts the file's own facts, its space or its partition.
    """

    def __init__(self, reason: str, flaw: Flaw = "damaged", location: str = "") -> None:
        self.reason = reason
        self.location = location
        self.flaw: Flaw = flaw
        super().__init__(f"{location!r} cannot be read because {reason}" if location else reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOrigin:
    """Where the vectors of some rows come from.

    Attributes:
        rows_reused: rows whose vectors were taken from the file that is replaced.
        oldest_encoded_at: no vector was made before, in UTC, ISO 8601 with seconds; "" if that is
            unknown.
    """

    rows_reused: int = 0
    rows_encoded: int = 0
    oldest_encoded_at: str = ""


@dataclass(frozen=True, slots=True)
class FileFacts(VectorOrigin):
    """What an output file states about itself.

    Attributes:
        precision: arithmetic the vectors were made in, such as "fp32".
        content_digest: over the canonical (id, text) rows.
        desired_version: hash of content digest and space; Dagster's data version of the partition.
        truncated: texts whose first tokens are all that the model saw.
        source_rows: rows of the source that the file is made of, skipped ones included.
        skipped_rows: rows of the source that were left out, because they have no text.
        blank_texts: texts that are empty or only white space.
        rejected_rows: rows of the source that were set aside; see `output.rejected`.
        transient_rows: those of them that the next run tries again.
        rows_version: random, new whenever rows are written; the file keeps it when it is merely
            republished.
        carried_columns: their names and types (`in_words`); footers have no checksum.
    """

    partition_key: str
    space: str
    model: str
    precision: str
    source_version: str
    content_digest: str
    desired_version: str
    rows: int
    dimension: int
    truncated: int
    writer: str = WRITER
    source_rows: int = 0
    skipped_rows: int = 0
    blank_texts: int = 0
    rejected_rows: int = 0
    transient_rows: int = 0
    rows_version: str = ""
    carried_columns: str = ""


_text = partial(bytes.decode, errors="replace")
# Each fact's name and what reads its value, by the name of its entry.
_READERS = {
    f"surge.{fact.name}".encode(): (fact.name, int if fact.type == "int" else _text)
    for fact in fields(FileFacts)
}
ENTRY_NAMES = (_FORMAT, *_READERS, _METADATA_DIGEST)


@dataclass(frozen=True, slots=True)
class VectorFacts(VectorOrigin):
    truncated: int = 0

    @property
    def rows(self) -> int:
        return self.rows_reused + self.rows_encoded

    def plus(self, other: VectorFacts) -> VectorFacts:
        if not self.rows or not other.rows:
            return self if self.rows else other
        times = sorted((self.oldest_encoded_at, other.oldest_encoded_at))
        return VectorFacts(
            truncated=self.truncated + other.truncated,
            rows_reused=self.rows_reused + other.rows_reused,
            rows_encoded=self.rows_encoded + other.rows_encoded,
            oldest_encoded_at=times[0],  # "" is unknown, and less than any time
        )


def desired_version(content: str, space: str) -> str:
    """Return the hash of a content digest (or, until that is known, a source version) and a space
    name, 32 hex digits."""
    return hashlib.sha256(f"surge.desired.1\0{content}\0{space}".encode()).hexdigest()[:32]


@contextlib.contextmanager
def explained(location: str) -> Iterator[None]:
    """Turn what reading a file raises into one error that names the file and says why it cannot be
    read.

    That is `InvalidFile`, `FileNotFoundError`, or `TransientError` if the system did not give the
    file.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except InvalidFile as error:
        raise InvalidFile(error.reason, error.flaw, error.location or location) from error
    except UNREADABLE as error:
        if is_systems(error):
            raise not_given(repr(location) if location else "the file", error) from error
        raise InvalidFile(f"it is damaged ({first_line(error)})", location=location) from error


def guarded_metadata(facts: FileFacts) -> dict[bytes, bytes]:
    """Return the metadata entries of a file with these facts: its format, the facts, and the digest
    over all of them."""
    entries = {_FORMAT: FORMAT.encode()}
    for name, (fact, _) in _READERS.items():
        entries[name] = str(getattr(facts, fact)).encode("utf-8", "surrogatepass")
    return {**entries, _METADATA_DIGEST: _digest(entries)}


def facts_of(metadata: Mapping[bytes, bytes] | None) -> FileFacts:
    """Return the facts in the metadata of a file; raises `InvalidFile` if they are not as they were
    written."""
    metadata = metadata or {}
    *names, last = ENTRY_NAMES
    entries = {name: metadata[name] for name in names if name in metadata}
    stated_format = entries.get(_FORMAT, b"").decode("utf-8", "replace") or None
    if stated_format != FORMAT:
        raise InvalidFile(f"its metadata name the format {stated_format!r}; expected {FORMAT!r}")
    if metadata.get(last) != _digest(entries):
        raise InvalidFile(
            "its metadata do not match their own digest: they were changed after the file was "
            "written"
        )
    try:
        facts = {fact: read(entries[name]) for name, (fact, read) in _READERS.items()}
        return FileFacts(**facts)  # pyright: ignore[reportArgumentType]
    except (KeyError, ValueError) as error:  # another version writes other entries
        raise InvalidFile(f"its metadata cannot be read ({error})") from error


def _digest(entries: Mapping[bytes, bytes]) -> bytes:
    lines = b"\n".join(map(b"\0".join, sorted(entries.items())))
    return hashlib.sha256(lines + b"\n").hexdigest()[:32].encode()
