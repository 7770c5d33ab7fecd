"""A catalog folder that can be built again: a build writes only partitions that differ and removes the others.

    <folder>/_catalog.json                       the kind of the catalog, and what its builder remembers
    <folder>/partition=<encoded key>/part-0.parquet

Each file's metadata holds the version of its partition. An interrupted build therefore continues where it stopped, and
a build without changes keeps even the modification times. The engine's source ignores names that begin with `_` or
`.`: the manifest and unfinished files.
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

_MANIFEST = "_catalog.json"
_FILE = "part-0.parquet"
_COLUMNS = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("text", pa.string(), nullable=False)])


@dataclass(frozen=True, slots=True)
class CatalogSummary:
    """Partitions and texts after a build, and how many partition files it wrote, kept and removed."""

    partitions: int
    texts: int
    written: int
    unchanged: int
    removed: int


@dataclass(frozen=True, slots=True)
class WrittenPartition:
    """What a partition's file holds."""

    version: str
    rows: int


class CatalogFolder:
    """A folder that belongs to one kind of catalog ("demo", "synthetic").

    Attributes:
        memory: what the last build remembered; empty without one.

    Raises:
        ConfigError: the folder cannot be written, or holds something else.
    """

    def __init__(self, root: Path, kind: str) -> None:
        self._root = root
        self._kind = kind
        self.memory: dict[str, Any] = {}
        try:
            root.mkdir(parents=True, exist_ok=True)
            memory = self._read_manifest()
            if memory is not None:
                self.memory = memory
                return
            if any(root.iterdir()):
                raise ConfigError(
                    f"{root} is not empty and was not built as a {kind} catalog, so nothing was changed in it. "
                    "Choose another folder, or empty this one"
                )
            self._write_manifest()  # marks the folder, so that an interrupted build can continue
        except OSError as error:
            raise ConfigError(f"the catalog folder {root} can't be used: {error}") from error

    def remember(self, memory: dict[str, Any]) -> None:
        """Keep `memory` for the next build. The file is written only when the memory changed."""
        if memory != self.memory:
            self.memory = memory
            self._write_manifest()

    def written(self, key: str) -> WrittenPartition | None:
        """What the file of `key` holds, None when there is no valid one."""
        try:
            metadata = pq.read_metadata(self._path(key))
        except (OSError, pa.ArrowException):
            return None
        facts = metadata.metadata or {}
        if facts.get(KEY_METADATA) != key.encode() or SOURCE_VERSION_METADATA not in facts:
            return None
        return WrittenPartition(facts[SOURCE_VERSION_METADATA].decode(), metadata.num_rows)

    def write(self, key: str, version: str, row_groups: Iterable[tuple[pa.Array, pa.Array]]) -> None:
        """Write a partition's file atomically; each pair of ids and texts becomes a row group."""
        schema = _COLUMNS.with_metadata({KEY_METADATA: key.encode(), SOURCE_VERSION_METADATA: version.encode()})
        with (
            _replacing(self._path(key)) as temporary,
            # Ids and texts seldom repeat, so that dictionaries would only cost time.
            pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=False) as writer,
        ):
            for ids, texts in row_groups:
                writer.write_batch(pa.record_batch([ids, texts], schema=schema))

    def keep_only(self, keys: Iterable[str]) -> int:
        """Remove all partitions but `keys`, and files of a killed build; returns the number of removed partitions."""
        kept = {self._path(key).parent for key in keys}
        surplus = [path for path in self._root.glob("partition=*") if path not in kept]
        for path in surplus:
            shutil.rmtree(path)
        for path in self._root.glob(f"partition=*/.{_FILE}.*.tmp"):
            path.unlink(missing_ok=True)
        return len(surplus)

    def _path(self, key: str) -> Path:
        return self._root / f"partition={encode_key(key)}" / _FILE

    def _read_manifest(self) -> dict[str, Any] | None:
        """The memory in the manifest, None when there is no manifest of this kind."""
        try:
            document = json.loads((self._root / _MANIFEST).read_text(encoding="utf-8"))
            if document["format"] == 1 and document["kind"] == self._kind:
                return dict(document["memory"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        return None

    def _write_manifest(self) -> None:
        document = {"format": 1, "kind": self._kind, "memory": self.memory}
        with _replacing(self._root / _MANIFEST) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces `path` at the end and is removed after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error}. The earlier file was not changed") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
