"""Confirmations: which version of each partition's rows a named consumer has applied.

    .changes/<space>/consumers/<encoded name>.parquet

A consumer is registered by its first confirmation. To forget one, remove its file. A damaged file
counts as empty, so that the consumer gets everything again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.files.facts import (
    WRITER,
    AnyFacts,
    InvalidFile,
    guarded_metadata,
    invalid_when_damaged,
)
from surge_dagster.engine.files.parquet import read_guarded
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key

log = logging.getLogger(__name__)

CHANGES = ".changes"
FORMAT = "consumer 1"
_COLUMNS = pa.schema(
    [pa.field("partition", pa.string(), False), pa.field("version", pa.string(), False)]
)


@dataclass(frozen=True, slots=True)
class ConsumerFacts:
    consumer: str
    space: str
    rows: int  # one for each partition
    writer: str = WRITER


def consumers(store: Store, space: str) -> list[str]:
    """Return the encoded names of the registered consumers of a space."""
    files = [stored.name.rpartition("/")[2] for stored in store.list(_folder(space))]
    return sorted(name.removesuffix(".parquet") for name in files)


def confirmed_versions(store: Store, space: str, consumer: str) -> dict[str, str] | None:
    """Return the version of each partition's rows that a consumer has applied.

    Args:
        consumer: its encoded name; None is returned if it is not registered.
    """
    name = f"{_folder(space)}/{consumer}.parquet"
    try:
        facts, table = read_table(store, name, ConsumerFacts, FORMAT)
        if facts.space != space or encode_key(facts.consumer) != consumer:
            raise InvalidFile(f"it belongs to {facts.consumer!r} in the space {facts.space!r}")
        return dict(zip(table["partition"].to_pylist(), table["version"].to_pylist(), strict=True))
    except FileNotFoundError:
        return None
    except InvalidFile as error:
        place = store.location(name)
        log.warning("%s counts as empty, so that the consumer gets everything: %s", place, error)
        return None


def confirm_versions(store: Store, space: str, consumer: str, versions: Mapping[str, str]) -> None:
    """Replace the confirmations of a consumer; they are durable when this returns."""
    facts = ConsumerFacts(consumer, space, len(versions))
    table = pa.Table.from_arrays(
        [pa.array(list(versions), pa.string()), pa.array(list(versions.values()), pa.string())],
        schema=_COLUMNS,
    )
    name = f"{_folder(space)}/{encode_key(consumer)}.parquet"
    write_table(store, name, table, guarded_metadata(facts, FORMAT))
    store.sync(_folder(space))


def forget_elsewhere(store: Store, space: str, consumer: str) -> None:
    """Remove what a consumer has confirmed of other spaces, before its copy is of this one.

    Otherwise it would get only the latest changes when it comes back to such a space, and its copy
    would have vectors of two spaces.
    """
    own = encode_key(consumer)
    for other in list_spaces(store):
        if other.name != space and own in consumers(store, other.name):
            store.delete(f"{_folder(other.name)}/{own}.parquet")


def write_table(store: Store, name: str, table: pa.Table, metadata: Mapping[bytes, bytes]) -> None:
    """Write a small Parquet file whose pages have checksums."""
    with store.create(name) as upload:
        options = {"compression": "zstd", "write_statistics": False, "store_schema": False}
        with pq.ParquetWriter(
            upload.sink, table.schema, write_page_checksum=True, **options
        ) as writer:
            writer.add_key_value_metadata(metadata)  # pyright: ignore[reportArgumentType]
            writer.write_table(table)
        upload.publish(lambda: None)


def read_table(
    store: Store, name: str, kind: type[AnyFacts], file_format: str
) -> tuple[AnyFacts, pa.Table]:
    """Return the facts and rows of a file of `write_table`; raise `InvalidFile` for damage."""
    with store.open(name) as source, invalid_when_damaged("content is"):
        reader = pq.ParquetFile(source, page_checksum_verification=True)
        facts = read_guarded(reader.metadata, kind, file_format)
        return facts, reader.read(use_threads=False).replace_schema_metadata(None)


def _folder(space: str) -> str:
    return f"{CHANGES}/{space}/consumers"
