"""A catalog folder that is built again and again: only what differs is written, what has gone is removed.

    <folder>/_catalog.json                       who builds it, with which arguments, and what the builder remembers
    <folder>/partition=<encoded key>/part-0.parquet

A partition's file says in its own metadata which version of the partition it holds, so that a build that was cut short
goes on where it stopped, and a build of what is already there leaves even the modification times alone. The
engine's source passes over names that begin with `_` or `.`, and so over the manifest and over unfinished files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.partition import KEY_METADATA, SOURCE_VERSION_METADATA
from surge_dagster.engine.support.keys import encode_key

ROW_GROUP_ROWS = 65_536

_MANIFEST = "_catalog.json"
_FOLDER_PREFIX = "partition="
_FILE = "part-0.parquet"
_COLUMNS = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("text", pa.string(), nullable=False)])


@dataclass(frozen=True, slots=True)
class CatalogSummary:
    """What a build left behind: partitions and texts in all, and what it did to the partitions' files."""

    partitions: int
    texts: int
    written: int
    unchanged: int
    removed: int


@dataclass(frozen=True, slots=True)
class Held:
    """What a partition's file holds now."""

    version: str
    rows: int


class CatalogFolder:
    """One folder that belongs to one kind of builder ("demo", "synthetic").

    Raises:
        ConfigError: the folder can't be written, or holds something that this builder didn't put there.
    """

    def __init__(self, root: Path, kind: str) -> None:
        self._root = root
        self._kind = kind
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._memory = self._read_manifest()
            if self._memory is None:
                if any(root.iterdir()):
                    raise ConfigError(
                        f"{root} is not empty and was not built as a {kind} catalog, so nothing was changed in it. "
                        "Choose another folder, or empty this one"
                    )
                self.remember({})  # claims the folder: a build that is cut short can go on
        except OSError as error:
            raise ConfigError(f"the catalog folder {root} can't be used: {error}") from error

    def memory(self) -> dict[str, Any]:
        """What the last build asked to be remembered, empty where there was none."""
        return self._memory or {}

    def remember(self, memory: dict[str, Any]) -> None:
        """Keep `memory` for the next build; an equal one leaves the file alone."""
        if memory == self._memory:
            return
        document = {"format": 1, "kind": self._kind, "memory": memory}
        with _replacing(self._root / _MANIFEST) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        self._memory = memory

    def held(self, key: str) -> Held | None:
        """What the file of `key` holds, None where there is no valid one."""
        try:
            metadata = pq.read_metadata(self._path(key))
        except (OSError, pa.ArrowException):
            return None
        facts = metadata.metadata or {}
        if facts.get(KEY_METADATA) != key.encode() or SOURCE_VERSION_METADATA not in facts:
            return None
        return Held(facts[SOURCE_VERSION_METADATA].decode(), metadata.num_rows)

    def write(self, key: str, version: str, batches: Iterable[tuple[pa.Array, pa.Array]]) -> None:
        """Put a partition's file in place, whole or not at all; each pair of ids and texts becomes a row group."""
        path = self._path(key)
        schema = _COLUMNS.with_metadata({KEY_METADATA: key.encode(), SOURCE_VERSION_METADATA: version.encode()})
        with (
            _replacing(path) as temporary,
            # Ids and texts hardly repeat: dictionaries would cost time and be thrown away.
            pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=False) as writer,
        ):
            for ids, texts in batches:
                writer.write_batch(pa.record_batch([ids, texts], schema=schema))

    def keep_only(self, keys: Iterable[str]) -> int:
        """Remove every partition but `keys`, and what a killed build left half written; returns how many went."""
        wanted = {_folder_name(key) for key in keys}
        surplus = [path for path in self._root.glob(f"{_FOLDER_PREFIX}*") if path.name not in wanted]
        for path in surplus:
            shutil.rmtree(path)
        for path in self._root.glob(f"{_FOLDER_PREFIX}*/.{_FILE}.*.tmp"):
            path.unlink(missing_ok=True)
        return len(surplus)

    def _path(self, key: str) -> Path:
        return self._root / _folder_name(key) / _FILE

    def _read_manifest(self) -> dict[str, Any] | None:
        try:
            document = json.loads((self._root / _MANIFEST).read_text(encoding="utf-8"))
            if document["format"] == 1 and document["kind"] == self._kind:
                return dict(document["memory"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        return None


def _folder_name(key: str) -> str:
    return f"{_FOLDER_PREFIX}{encode_key(key)}"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place when the block ends well and is gone when it doesn't."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"{path} can't be written: {error}. What was there before is still there") from error
        raise
