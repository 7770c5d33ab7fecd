"""A table or query of BigQuery as a `Source`, read through the Storage Read API.

    one aggregate query         ──► key, rows, bytes and version of each partition
    one query of the columns    ──► a result table, which BigQuery keeps for a day
    read sessions on it         ──► rows of the next few keys, sorted by id ──► partitions

BigQuery's rows have no order, so a partition's are sorted by id. Reading the result table costs
nothing, and it does not change while it is read. A session reads a partition and those that follow
it, up to 16 MiB; a larger partition is sorted by BigQuery and streamed. The values of a row's key
are one column, as a list in JSON.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.sources.bad_rows import with_reason
from surge_dagster.engine.sources.batching import BATCH_ROWS
from surge_dagster.engine.sources.checked_rows import checked_rows
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.store.object_client import CLOUD_SCOPE, GcpOptions
from surge_dagster.engine.support.keys import joined_key
from surge_dagster.engine.support.printable import first_line
from surge_dagster.engine.tables.grouping import NO_KEY, no_key_reason, unassigned_key, without_key

if TYPE_CHECKING:
    from google.cloud.bigquery import Client
    from google.cloud.bigquery_storage_v1 import BigQueryReadClient

BIGQUERY_SCHEME = "bigquery://"
_TABLE = re.compile(r"[^\s`.]+\.[^\s`.]+\.[^\s`.]+")
_SESSION_BYTES = 16 * 1024 * 1024  # of the rows of one session
_SESSION_KEYS = 1_000  # their values are in a session's filter, which may have a megabyte
_ROLES = "bigquery.jobUser, bigquery.dataViewer and bigquery.readSessionUser"
# By query: a sensor lists a table every 30 seconds.
_LISTINGS: dict[str, tuple[datetime, list[_Listed]]] = {}
# Time in which a table is not listed again: partitions are published one by one.
_LOOKED_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Listed:
    """One partition in the answer of the aggregate query, or all rows without a key."""

    key: str
    json_keys: Sequence[str]
    unnamed: Sequence[str]  # columns of the key without a value
    rows: int
    bytes: int
    version: str


class BigQueryCatalog:
    """A table or query, divided by columns.

    Args:
        source: `project.dataset.table`, with or without `bigquery://`; `bigquery://project` with a
            query.
        query: its rows are the catalog, instead of a table's.
        updated_at: a column that grows when a row changes. Its maximum and the number of rows are a
            partition's version. Without it, BigQuery reads the texts for a fingerprint of the rows.
        open_storage: opens the client of the Storage Read API at the first read.
    """

    def __init__(
        self,
        client: Client,
        source: str,
        partition_by: Sequence[str],
        selection: Selection | None = None,
        *,
        open_storage: Callable[[], BigQueryReadClient],
        query: str | None = None,
        updated_at: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        table = source.removeprefix(BIGQUERY_SCHEME)
        self.url, self._from = _rows_of(table, query)
        if not partition_by:
            raise ConfigError(
                f"{self.url} needs the setting partition_by: the column that divides it into "
                "partitions."
            )
        self.selection = selection or Selection()
        self._client = client
        self._storage = cache(open_storage)
        self._partition_by = partition_by
        self._updated_at = updated_at
        self._table = None if query is not None else table
        self._key = f"TO_JSON_STRING([{', '.join(map(_key_value, partition_by))}]) AS surge_key"
        self._columns = ", ".join(map(_quoted, self.selection.columns))
        self._rows: _Rows | None = None
        self._clock = clock
        self._looked = float("-inf")
        self._versions: dict[str, str] = {}

    def __iter__(self) -> Iterator[Partition]:
        listing = self._listing()
        self._rows = None
        for place, listed in enumerate(listing):
            version = listed.version + self.selection.version_suffix
            is_set_aside = bool(listed.unnamed) and self.selection.bad_rows == "set_aside"
            yield Partition(
                key=listed.key,
                source_version=version,
                read=partial(self._read, listing, place),
                current_source_version=partial(self._current, listed.key, version),
                rows=0 if is_set_aside else listed.rows,
                source_rows=listed.rows,
                text_bytes=listed.bytes,
                page_bytes=2 * _SESSION_BYTES,
                id_bytes=self.selection.id_bytes,
            )

    def _listing(self) -> list[_Listed]:
        """Return the partitions; send a query only if the table may have changed."""
        self._looked = self._clock()
        modified = self._last_change()
        sql = self._listing_query()
        known_modified, listing = _LISTINGS.get(sql, (None, []))
        if modified is None or known_modified != modified:
            listing = self._list(sql)
        if modified is not None:
            _LISTINGS[sql] = modified, listing
        if self.selection.bad_rows == "set_aside":
            listing = _with_unassigned(listing)
        self._versions = {listed.key: listed.version for listed in listing}
        return listing

    def _last_change(self) -> datetime | None:
        """Return when the table was modified, which is free of charge; None if it is unknown."""
        if self._table is None:
            return None
        with _errors(self.url):
            table = self._client.get_table(self._table)
        is_known = table.table_type == "TABLE" and table.streaming_buffer is None
        return table.modified if is_known else None

    def _listing_query(self) -> str:
        row = f"TO_JSON_STRING(STRUCT({self._columns}))"
        # Their sum: with BIT_XOR, two equal rows would count as none.
        version = f"CAST(SUM(CAST(FARM_FINGERPRINT({row}) AS NUMERIC)) AS STRING)"
        if self._updated_at:
            version = f"CAST(MAX({_quoted(self._updated_at)}) AS STRING)"
        return (
            f"SELECT {self._key}, COUNT(*) AS surge_rows, SUM(BYTE_LENGTH({row})) AS surge_bytes, "
            f"{version} AS surge_version\nFROM {self._from}\nGROUP BY surge_key"
        )

    def _list(self, sql: str) -> list[_Listed]:
        listing: list[_Listed] = []
        with _errors(self.url):
            for record in self._client.query_and_wait(sql):
                listing.append(self._listed(record))
        return sorted(listing, key=lambda listed: listed.key.encode())

    def _listed(self, record: Any) -> _Listed:
        json_key = record["surge_key"]
        values = dict(zip(self._partition_by, json.loads(json_key), strict=True))
        rows = record["surge_rows"]
        return _Listed(
            key=joined_key({name: value or NO_KEY for name, value in values.items()}),
            json_keys=[json_key],
            unnamed=[name for name, value in values.items() if value is None],
            rows=rows,
            bytes=record["surge_bytes"] or 0,
            version=f"{rows}-{record['surge_version']}",
        )

    def _current(self, key: str, version: str) -> str | None:
        """Return the version that a partition has now; a query is not sent again for it."""
        if self._table is None:
            return version
        if self._clock() - self._looked > _LOOKED_SECONDS:
            self._listing()
        now = self._versions.get(key)
        return None if now is None else now + self.selection.version_suffix

    def _read(self, listing: Sequence[_Listed], place: int) -> Iterator[RowBatch]:
        listed = listing[place]
        if listed.unnamed and self.selection.bad_rows == "refuse":
            raise without_key(listed.key, listed.rows, listed.unnamed)
        with _errors(self.url, listed.key):
            if self._rows is None or self._rows.listed is not listing:
                sql = f"SELECT {self._key}, {self._columns}\nFROM {self._from}"
                self._rows = _Rows(self._client, self._storage(), sql, self.selection, listing)
            rows = self._rows.of(place)
            if listed.unnamed:
                reason = no_key_reason(listed.unnamed)
                rows = (with_reason(batch, reason) for batch in rows)
            yield from checked_rows(self.selection, listed.key, rows)


def _with_unassigned(listing: Sequence[_Listed]) -> list[_Listed]:
    """Return the listing with one partition of all rows without a key."""
    others = [listed for listed in listing if not listed.unnamed]
    unassigned = [listed for listed in listing if listed.unnamed]
    if not unassigned:
        return others
    versions = "".join(f"{listed.json_keys[0]}\0{listed.version}\n" for listed in unassigned)
    joined = _Listed(
        key=unassigned_key(listed.key for listed in others),
        json_keys=[listed.json_keys[0] for listed in unassigned],
        unnamed=list(dict.fromkeys(name for listed in unassigned for name in listed.unnamed)),
        rows=sum(listed.rows for listed in unassigned),
        bytes=sum(listed.bytes for listed in unassigned),
        version=hashlib.sha256(versions.encode()).hexdigest()[:32],
    )
    return sorted([*others, joined], key=lambda listed: listed.key.encode())


def _rows_of(table: str, query: str | None) -> tuple[str, str]:
    """Return what messages call a source, and what its queries are FROM."""
    if bool(_TABLE.fullmatch(table)) == (query is not None):
        raise ConfigError(
            f"the source {table!r} is not one of BigQuery. Give a table as "
            "bigquery://project.dataset.table, or bigquery://project with the setting query."
        )
    if query is None:
        return f"{BIGQUERY_SCHEME}{table}", _quoted(table)
    return "the query of BigQuery", f"(\n{query.rstrip().rstrip(';')}\n)"


def open_bigquery(
    source: str,
    partition_by: Sequence[str],
    selection: Selection,
    gcp: GcpOptions,
    *,
    query: str | None = None,
    updated_at: str | None = None,
) -> BigQueryCatalog:
    """Open a table or a query with the project and the credentials of `gcp`.

    The source of a query names the project. Importing Google's clients takes two seconds.
    """
    from google.cloud import bigquery

    with _errors("BigQuery"):
        credentials = gcp.load(CLOUD_SCOPE)
        project = gcp.project if query is None else source.removeprefix(BIGQUERY_SCHEME)
        try:
            client = bigquery.Client(project, credentials, location=gcp.location)
        except OSError as error:
            raise ConfigError(
                f"{first_line(error)} Set GOOGLE_CLOUD_PROJECT, or project in the setting gcp."
            ) from error

    def open_storage() -> BigQueryReadClient:
        from google.cloud.bigquery_storage_v1 import BigQueryReadClient

        return BigQueryReadClient(credentials=credentials)

    return BigQueryCatalog(
        client,
        source,
        partition_by,
        selection,
        open_storage=open_storage,
        query=query,
        updated_at=updated_at,
    )


class _Rows:
    """The rows of one listing, read from a result table."""

    def __init__(
        self,
        client: Client,
        storage: BigQueryReadClient,
        sql: str,
        selection: Selection,
        listed: Sequence[_Listed],
    ) -> None:
        self.listed = listed
        self._client = client
        self._storage = storage
        self._sql = sql
        self._columns = selection.columns
        self._sets_aside = selection.bad_rows == "set_aside"
        self._order = [selection.id]
        if self._sets_aside:  # so that the same one of rows with one id is kept each time
            self._order = list(dict.fromkeys((selection.id, *selection.text_columns)))
        self._held: dict[str, pa.Table] = {}  # of the last session, by key
        self._result: Any = None  # of the query, which bills all rows: made for the first session

    def of(self, place: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition, sorted by id."""
        listed = self.listed[place]
        if listed.bytes > _SESSION_BYTES:
            of_key = f"SELECT * FROM ({self._sql})\nWHERE {_filter([listed])}"
            result = self._run(f"{of_key}\nORDER BY {', '.join(map(_quoted, self._order))}")
            yield from self._read(result, self._columns)
            return
        # Kept until the next session: a repeated id makes the engine read a partition again.
        if listed.key not in self._held:
            self._held = self._read_session(place)
        yield from self._held[listed.key].to_batches(max_chunksize=BATCH_ROWS)

    def _read_session(self, place: int) -> dict[str, pa.Table]:
        """Read this partition and those that follow it in one session."""
        wanted: list[_Listed] = []
        size = 0
        for listed in self.listed[place : place + _SESSION_KEYS]:
            size += listed.bytes
            if wanted and size > _SESSION_BYTES:
                break
            if self._sets_aside or not listed.unnamed:
                wanted.append(listed)

        self._result = self._result or self._run(self._sql)
        columns = ["surge_key", *self._columns]
        batches = list(self._read(self._result, columns, _filter(wanted)))
        if not batches:
            raise TransientError("BigQuery returned no rows: the source was changed. Run again.")
        table = pa.Table.from_batches(batches)
        try:
            table = table.sort_by([(name, "ascending") for name in ("surge_key", *self._order)])
        except pa.ArrowException as error:
            types = [f"the column {name!r} has type {table[name].type}" for name in self._order]
            raise ConfigError(
                f"rows cannot be sorted: {' and '.join(types)}. Name a column of strings or "
                "integers with the setting id, and plain columns with text."
            ) from error

        held = {listed.key: table.slice(0, 0) for listed in wanted}
        keys = {json_key: listed.key for listed in wanted for json_key in listed.json_keys}
        begin = 0
        for json_key, of_key in groupby(table["surge_key"].to_pylist()):
            rows = len(list(of_key))
            key = keys[json_key]
            held[key] = pa.concat_tables([held[key], table.slice(begin, rows)])
            begin += rows
        return held

    def _run(self, sql: str) -> Any:
        job = self._client.query(sql)
        job.result()
        return job.destination

    def _read(
        self, result: Any, columns: Sequence[str], restriction: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows of a result table in its order."""
        from google.cloud.bigquery_storage_v1 import types

        options = types.ReadSession.TableReadOptions(
            selected_fields=list(columns), row_restriction=restriction
        )
        session = self._storage.create_read_session(
            parent=f"projects/{self._client.project}",
            read_session=types.ReadSession(
                table=result.to_bqstorage(),
                data_format=types.DataFormat.ARROW,
                read_options=options,
            ),
            max_stream_count=1,
        )
        for stream in session.streams:
            schema = pa.ipc.read_schema(pa.py_buffer(session.arrow_schema.serialized_schema))
            for message in self._storage.read_rows(stream.name):
                content = pa.py_buffer(message.arrow_record_batch.serialized_record_batch)
                yield pa.ipc.read_record_batch(content, schema).select(list(columns))


def _filter(listed: Sequence[_Listed]) -> str:
    # A string of JSON is one of SQL too.
    keys = [json.dumps(key, ensure_ascii=False) for each in listed for key in each.json_keys]
    return f"surge_key IN ({', '.join(keys)})"


def _key_value(column: str) -> str:
    """Return a value of a key as a string; null if it is empty or is `NO_KEY`."""
    return f"NULLIF(NULLIF(CAST({_quoted(column)} AS STRING), ''), '{NO_KEY}')"


def _quoted(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


@contextmanager
def _errors(url: str, key: str | None = None) -> Iterator[None]:
    """Turn the errors of Google's clients into the project's."""
    from google.api_core import exceptions as google
    from google.auth.exceptions import GoogleAuthError, TransportError
    from requests import RequestException

    where = url if key is None else f"partition {key!r}: {url}"
    try:
        yield
    except google.FailedPrecondition as error:
        message = f"the read session ended ({first_line(error)}); one lasts six hours. Run again."
        raise TransientError(f"{where}: {message}", key) from error
    except (google.Forbidden, google.Unauthorized) as error:
        raise ConfigError(
            f"{where} cannot be read ({first_line(error)}). Grant the account the roles {_ROLES}, "
            "then run again."
        ) from error
    except (google.BadRequest, google.NotFound) as error:
        raise ConfigError(
            f"{where} cannot be read ({first_line(error)}). Check the settings source or query, "
            "partition_by, updated_at, id and text: the table and its columns must exist."
        ) from error
    except (google.GoogleAPIError, RequestException, TransportError) as error:
        raise TransientError(
            f"{where}: BigQuery does not answer ({first_line(error)}). Run again.", key
        ) from error
    except GoogleAuthError as error:
        raise ConfigError(
            f"{where}: no credentials for BigQuery ({first_line(error)}). Run `gcloud auth "
            "application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, or give the setting "
            "gcp."
        ) from error
