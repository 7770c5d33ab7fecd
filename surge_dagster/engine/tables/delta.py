"""Delta tables, through deltalake: their rows are those of the newest version in the log.

A table is divided by a key as one of files is; its version in the log is what a run looks at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.sources.listing import (
    DELTA_LOG,
    remedy_of_table,
    split_pattern,
    table_format,
)
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.store.object_client import StorageOptions, service_account_key
from surge_dagster.engine.support.printable import first_line
from surge_dagster.engine.support.urls import is_object_store, local_path
from surge_dagster.engine.tables.frames import frame_blocks
from surge_dagster.engine.tables.grouping import Block
from surge_dagster.engine.tables.table import TableSource

if TYPE_CHECKING:
    from deltalake import DeltaTable


def is_delta(url: str, options: StorageOptions | None) -> bool:
    """Return whether a local folder, or a prefix of a bucket, is a Delta table.

    Raises:
        ConfigError: it lies inside of a table on a disk.
    """
    if not is_object_store(url):
        path = local_path(url, what="source")
        for above in path.parents:
            kind = table_format(above)
            if kind is not None:
                raise ConfigError(
                    f"the source {url!r} lies in the {kind} table {str(above)!r}, whose files are "
                    f"not its rows. {remedy_of_table(kind)}"
                )
        return table_format(path) == "Delta"
    if split_pattern(url)[1] is not None:
        return False

    from surge_dagster.engine.store.object_store import open_object_store

    bucket = open_object_store(url, options, what="source")
    return next(bucket.list(DELTA_LOG), None) is not None


class DeltaSource(TableSource):
    """A Delta table; it is divided by its own partition columns, if no others are named."""

    def __init__(
        self,
        url: str,
        partition_by: Sequence[str],
        selection: Selection,
        options: StorageOptions | None,
    ) -> None:
        self.url = url
        options = options or StorageOptions()
        self._place = url
        identity = f"delta {url} {options.endpoint}"
        if not is_object_store(url):
            self._place = str(local_path(url, what="source"))
            identity = f"delta {self._place}"
        self._options = _storage_options(options)
        self._table = self._open()
        partition_by = partition_by or self._table.metadata().partition_columns
        if not partition_by:
            raise ConfigError(
                f"the Delta table {url!r} has no partition columns. Name the column that divides "
                f"it: `surge-dagster embed {url} OUTPUT --partition-by COLUMN`."
            )
        super().__init__(url, identity, partition_by, selection)

    def _version(self) -> str:
        """Look at the log, and return the newest version of the table."""
        self._table = self._open()
        return f"{self._table.metadata().id}-{self._table.version()}"

    def _blocks(self) -> Iterator[Block]:
        """Yield the rows of the version that was looked at last, with their keys."""
        yield from frame_blocks(self.url, self._table, self._partition_by, self._selection)

    def _open(self) -> DeltaTable:
        try:
            from deltalake import DeltaTable
        except ImportError as error:
            raise ConfigError(
                f"the source {self.url!r} is a Delta table, which needs the package "
                f"{error.name}: pip install 'surge-dagster[delta]'"
            ) from error
        try:
            return DeltaTable(self._place, storage_options=self._options)
        except Exception as error:  # deltalake's errors have no base class
            raise TransientError(
                f"the Delta table {self.url!r} could not be opened ({first_line(error)}). "
                "Run again when its storage answers."
            ) from error


def _storage_options(options: StorageOptions) -> dict[str, str]:
    """Return the options that are set, by deltalake's names; the environment has the others."""
    named = {
        "aws_access_key_id": options.access_key_id,
        "aws_secret_access_key": options.secret_access_key,
        "aws_session_token": options.session_token,
        "aws_region": options.region,
        "google_service_account": options.service_account,
    }
    if options.gcp.gcp_credentials is not None:
        key = service_account_key(options.gcp.gcp_credentials)
        named["google_service_account_key"] = json.dumps(key)
    if options.endpoint is not None:
        named["aws_endpoint_url"] = options.endpoint
        named["aws_region"] = options.region or "us-east-1"
        named["allow_http"] = str(options.endpoint.startswith("http://")).lower()
    return {name: value for name, value in named.items() if value is not None}
