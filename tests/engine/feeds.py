"""Outputs whose change feed is known, and a consumer that applies it to a dict."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.feed.changes import Changes, changes
from surge_dagster.engine.files import parquet
from surge_dagster.engine.files.facts import FileFacts, desired_version
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.rows import schema, table_of
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.run.change_feed import RowChanges, write_changes
from surge_dagster.engine.store.local_store import LocalStore
from tests.small_catalogs import DIMENSION as RUN_DIMENSION

DIMENSION = 8
Texts = Mapping[str, str]  # of a partition, by id, in order
Applied = dict[str, dict[str, tuple[str, bytes]]]  # text and vector by partition and id


class Output:
    """An output whose files are written by hand, with or without the change files that lead to
    them."""

    def __init__(self, root: Path, dtype: str = "float32") -> None:
        self.store = LocalStore(root)
        spec = EncodingSpec(f"hash://{DIMENSION}", dtype=dtype)
        self.space = claim_space(self.store, spec.resolve())
        self.rows: dict[str, dict[str, str]] = {}
        self.versions: dict[str, str] = {}

    def write(
        self,
        key: str,
        texts: Texts,
        *,
        with_changes: bool = True,
        truncated: Collection[str] = (),
    ) -> None:
        """Replace a partition's file, in which the rows with some ids are truncated."""
        before = self.rows.get(key)
        version = secrets.token_hex(16)
        ids = pa.array(list(texts)) if texts else pa.array([], pa.string())
        if before is not None and with_changes:
            is_changed = [before.get(row) != text for row, text in texts.items()]
            deleted = pa.array([row for row in before if row not in texts], pa.string())
            changed = ids.filter(pa.array(is_changed, pa.bool_()))
            changes = RowChanges([changed], deleted, self.versions[key])
            write_changes(self.store, facts_of(key, self.space.name, texts, version), changes)
        path = self.store.root / self.name(key)
        write_file(path, key, self.space, texts, version, truncated)
        self.rows[key] = dict(texts)
        self.versions[key] = version

    def remove(self, key: str) -> None:
        """Remove a partition."""
        self.store.delete(self.name(key))
        del self.rows[key]

    def name(self, key: str) -> str:
        return file_name(self.space.name, key)

    def feed(self, consumer: str | None = "shop", **options: Any) -> Changes:
        return changes(self.store, consumer, **options)

    def expected(self) -> Applied:
        """The rows of all files."""
        catalog = {key: texts.items() for key, texts in self.rows.items()}
        return rows_of(catalog, DIMENSION, self.space.dtype)


def rows_of(
    catalog: Mapping[str, Iterable[tuple[str, str]]],
    dimension: int = RUN_DIMENSION,
    dtype: str = "float32",
) -> Applied:
    """What a consumer has that applied the changes of a catalog which runs with `hash_pool`
    embedded; its vectors as float32."""
    applied: Applied = {}
    for key, rows in catalog.items():
        for row_id, text in rows:
            vector = hash_vectors([text], dimension)[0].astype(dtype).astype(np.float32)
            applied.setdefault(key, {})[row_id] = (text, vector.tobytes())
    return applied


def write_file(
    path: Path,
    key: str,
    space: Space,
    texts: Texts,
    version: str,
    truncated: Collection[str] = (),
) -> None:
    """Write an output file of the format of this version, in several row groups."""
    columns = schema(
        pa.int64() if 1 in texts else pa.string(), DIMENSION, space.dtype, include_text=True
    )
    facts = facts_of(key, space.name, texts, version)
    items = list(texts.items())
    groups: list[pa.Table] = []
    for start in range(0, len(items), 3):
        ids, strings = map(pa.array, zip(*items[start : start + 3], strict=True))
        vectors = hash_vectors(strings.to_pylist(), DIMENSION).astype(space.dtype)
        cut = np.array([row in truncated for row in ids.to_pylist()])
        rows = table_of(columns, [ids], strings.cast(pa.large_string()), vectors, truncated=cut)
        groups.append(rows)
    with pa.OSFile(str(path), "wb") as sink:
        parquet.write_file(sink, columns, facts, groups)


def facts_of(key: str, space: str, texts: Texts, version: str) -> FileFacts:
    """The facts of a file of these rows."""
    return FileFacts(
        partition_key=key,
        space=space,
        model="hash",
        precision="fp32",
        source_version=version,
        content_digest=version,
        desired_version=desired_version(version, space),
        rows=len(texts),
        dimension=DIMENSION,
        truncated=0,
        rows_version=version,
    )


def changed_ids(changes: RowChanges) -> list[Any]:
    """The ids that were added or changed."""
    return [row_id for ids in changes.changed for row_id in ids.to_pylist()]


def hand_over(feed: Changes, target: Applied) -> list[tuple[str, str, str | None]]:
    """What a consumer gets that applies all changes and confirms them, as `apply` has it."""
    came = apply(feed, target)
    feed.confirm()
    return came


def apply(feed: Changes, target: Applied) -> list[tuple[str, str, str | None]]:
    """Apply a feed to a dict; gives op, partition and id of everything that came."""
    came = []
    if feed.is_new:
        target.clear()
    for partition in feed:
        for batch in partition:
            for row in batch.to_pylist():
                came.append((row["op"], row["partition"], row["id"]))
                rows = target.setdefault(row["partition"], {})
                match row["op"]:
                    case "clear":
                        rows.clear()
                    case "delete":
                        rows.pop(row["id"], None)
                    case _:
                        rows[row["id"]] = (
                            row["text"],
                            np.array(row["embedding"], np.float32).tobytes(),
                        )
    for key in list(target):
        if not target[key]:
            del target[key]
    return came
