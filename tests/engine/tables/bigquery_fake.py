"""BigQuery on 127.0.0.1 for Google's own clients: the REST API of queries and tables, and the
Storage Read API.

It holds one table, and answers the three queries that the source makes: the listing, all rows, and
the rows of one partition in order. Rows come in any order, in small messages, as BigQuery gives
them.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import reduce
from operator import add, xor
from typing import TYPE_CHECKING, Any
from unittest import mock

import grpc
import pyarrow as pa
import pyarrow.compute as pc

from tests.http_server import Answer, Request, json_server
from tests.small_catalogs import Rows

if TYPE_CHECKING:  # Google's packages take two seconds of each process that collects tests
    from google.cloud import bigquery
    from google.cloud.bigquery_storage_v1 import BigQueryReadClient, types

PROJECT = "p"
TABLE = "p.shop.products"
# Ids whose order as text is another than as numbers.
CATALOG: dict[str, Rows] = {
    key: sorted((f"{key}-{row}", f"text {row} of {key}") for row in range(count))
    for key, count in (
        ("a", 30),
        ("b", 2),
        ("it's, \\50%", 12),
        ("ß", 60),
        *((f"c{n}", 3) for n in range(20)),
    )
}
SOURCE = f"bigquery://{TABLE}"
_MESSAGE_ROWS = 7
_MODIFIED = itertools.count(1_000)
_NO_KEYS = (None, "", "__HIVE_DEFAULT_PARTITION__")
_LISTED = pa.schema(
    [
        ("surge_key", pa.string()),
        ("surge_rows", pa.int64()),
        ("surge_bytes", pa.int64()),
        ("surge_version", pa.string()),
    ]
)
_TYPES = {pa.string(): "STRING", pa.int64(): "INTEGER"}


def table_of(catalog: dict[str, Rows]) -> pa.Table:
    rows: list[dict[str, Any]] = []
    for key, found in catalog.items():
        for place, (row_id, text) in enumerate(found):
            rows.append({"category": key, "id": row_id, "text": text, "changed": place})
    rows.sort(key=lambda row: hash(row["id"]))
    return pa.Table.from_pylist(rows)


class Refused(Exception):
    """A request that BigQuery answers with status 400."""


class FakeBigQuery:
    """The service and its faults.

    Attributes:
        refused: the status and text with which calls of the Storage Read API are refused, by
            method.
        sessions: the keys filter of each read session.
        tokens: the header Authorization of each request for queries and tables.
        projects, locations: of the queries, as the client named them.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.modified = next(_MODIFIED)
        self.refused = dict[str, tuple[grpc.StatusCode, str]]()
        self.queries = list[str]()
        self.sessions = list[str]()
        self.tokens = list[str | None]()
        self.projects = list[str]()
        self.locations = list[str | None]()
        self._results = dict[str, pa.Table]()
        self._streams = dict[str, pa.Table]()
        self._lock = threading.Lock()

    def replace(self, table: pa.Table) -> None:
        self.table = table
        self.modified = next(_MODIFIED)

    @contextmanager
    def serve(self) -> Iterator[tuple[bigquery.Client, BigQueryReadClient]]:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import bigquery
        from google.cloud.bigquery_storage_v1 import BigQueryReadClient
        from google.cloud.bigquery_storage_v1.services.big_query_read.transports import (
            BigQueryReadGrpcTransport,
        )

        server = grpc.server(futures.ThreadPoolExecutor(8), handlers=[_Storage(self)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with (
                json_server(self._answer) as url,
                grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
            ):
                client = bigquery.Client(
                    project=PROJECT,
                    credentials=AnonymousCredentials(),
                    client_options={"api_endpoint": url},
                )
                transport = BigQueryReadGrpcTransport(channel=channel)
                yield client, BigQueryReadClient(transport=transport)
        finally:
            server.stop(None).wait()

    @contextmanager
    def serve_by_default(self) -> Iterator[None]:
        """Serve all sources of the process that open BigQuery; the environment's credentials are
        anonymous.

        The client of queries finds this server by the variable of Google's emulator. For that of
        the Storage Read API there is no such variable.
        """
        from google.auth.credentials import AnonymousCredentials

        with self.serve() as (client, storage):
            # Google's own variable
            emulator = {"BIGQUERY_EMULATOR_HOST": str(client._connection.API_BASE_URL)}
            with (
                mock.patch.dict("os.environ", emulator),
                mock.patch("google.auth.default", return_value=(AnonymousCredentials(), PROJECT)),
                mock.patch(
                    "google.cloud.bigquery_storage_v1.BigQueryReadClient",
                    lambda credentials: storage,
                ),
            ):
                yield

    def _answer(self, request: Request) -> Answer:
        self.tokens.append(request.headers["Authorization"])
        try:
            return Answer(_rest(self, request.path.partition("?")[0], request.document))
        except Refused as error:
            reason = [{"reason": "invalidQuery", "message": str(error)}]
            return Answer({"error": {"code": 400, "message": str(error), "errors": reason}}, 400)

    def query(self, sql: str) -> tuple[str, pa.Table]:
        """Answer a query; its result table is kept under the name that is returned."""
        with self._lock:
            self.queries.append(sql)
            columns = {name for name in sql.split("`")[1::2] if name != TABLE}
            if unknown := columns - set(self.table.column_names):
                raise Refused(f"Unrecognized name: {unknown.pop()}")
            result = self._listing(sql) if "GROUP BY" in sql else self._all_rows(sql)
            name = f"anon{len(self._results)}"
            self._results[name] = result
            return name, result

    def open_session(self, request: types.CreateReadSessionRequest) -> types.ReadSession:
        from google.cloud.bigquery_storage_v1 import types

        session = request.read_session
        result = self._results[session.table.rpartition("/")[2]]
        restriction = session.read_options.row_restriction
        with self._lock:
            self.sessions.append(restriction)
            found = _filtered(result, restriction).select(
                list(session.read_options.selected_fields)
            )
            name = f"s{len(self._streams)}"
            self._streams[name] = found
        schema = {"serialized_schema": found.schema.serialize().to_pybytes()}
        return types.ReadSession(
            name="session", data_format="ARROW", arrow_schema=schema, streams=[{"name": name}]
        )

    def rows(
        self, request: types.ReadRowsRequest, context: grpc.ServicerContext
    ) -> Iterator[types.ReadRowsResponse]:
        from google.cloud.bigquery_storage_v1 import types

        table = self._streams[request.read_stream]
        schema = {"serialized_schema": table.schema.serialize().to_pybytes()}
        for batch in table.combine_chunks().to_batches(max_chunksize=_MESSAGE_ROWS):
            content = batch.serialize().to_pybytes()
            message = {"serialized_record_batch": content, "row_count": len(batch)}
            yield types.ReadRowsResponse(
                row_count=len(batch), arrow_schema=schema, arrow_record_batch=message
            )

    def _keyed(self, sql: str) -> pa.Table:
        names = re.findall(
            r"CAST\(`([^`]+)` AS STRING\), ''\), '__HIVE_DEFAULT_PARTITION__'\)", sql
        )
        columns = [pc.cast(self.table[name], pa.string()).to_pylist() for name in names]
        keys: list[str] = []
        for values in zip(*columns, strict=True):
            known = [None if value in _NO_KEYS else value for value in values]
            keys.append(json.dumps(known, ensure_ascii=False))
        return self.table.append_column("surge_key", pa.array(keys, pa.string()))

    def _listing(self, sql: str) -> pa.Table:
        table = self._keyed(sql)
        newest = re.search(r"CAST\(MAX\(`(\w+)`\) AS STRING\)", sql)
        chosen = re.search(r"STRUCT\(([^)]*)\)", sql)
        assert chosen
        columns = re.findall(r"`([^`]+)`", chosen[1])
        found = dict[str, list[dict[str, Any]]]()
        for row in table.to_pylist():
            found.setdefault(row["surge_key"], []).append(row)

        listed: list[dict[str, Any]] = []
        for key, rows in found.items():
            texts = [json.dumps([row[name] for name in columns]) for row in rows]
            fingerprints = map(hash, texts)
            combine = xor if "BIT_XOR(FARM_FINGERPRINT(" in sql else add
            version = str(reduce(combine, fingerprints))
            if newest:
                version = str(max(row[newest[1]] for row in rows))
            size = sum(map(len, texts))
            listed.append(
                {
                    "surge_key": key,
                    "surge_rows": len(rows),
                    "surge_bytes": size,
                    "surge_version": version,
                }
            )
        return pa.Table.from_pylist(listed, schema=_LISTED)

    def _all_rows(self, sql: str) -> pa.Table:
        table = self._keyed(sql)
        ordered = re.search(r"\nWHERE (.*)\nORDER BY `(.*)`$", sql)
        if ordered is None:
            return table
        columns = ordered[2].split("`, `")
        return _filtered(table, ordered[1]).sort_by([(name, "ascending") for name in columns])


def _filtered(table: pa.Table, condition: str) -> pa.Table:
    """Return the rows for which a condition such as `surge_key IN ("[\\"a\\"]")` holds."""
    if not condition:
        return table
    wanted = json.loads(f"[{condition.removeprefix('surge_key IN (').removesuffix(')')}]")
    return table.filter(pa.array([key in wanted for key in table["surge_key"].to_pylist()]))


def _rest(fake: FakeBigQuery, path: str, body: dict[str, Any]) -> dict[str, Any]:
    if "/tables/" in path:
        return {
            "tableReference": _reference(*TABLE.split(".")),
            "type": "TABLE",
            "lastModifiedTime": str(fake.modified),
            "schema": {},
        }
    name = path.rpartition("/")[2]
    result = fake._results.get(name)
    if result is None:
        fake.projects.append(path.partition("/projects/")[2].partition("/")[0])
        job = body.get("jobReference", body)
        fake.locations.append(job.get("location"))
        query = body["query"] if name == "queries" else body["configuration"]["query"]["query"]
        name, result = fake.query(query)
    job = {"projectId": PROJECT, "jobId": name, "location": "US"}
    if "/jobs" in path:
        return _job(name, job)

    fields: list[dict[str, str]] = []
    for field in result.schema:
        fields.append({"name": field.name, "type": _TYPES.get(field.type, "STRING")})
    rows: list[dict[str, Any]] = []
    for row in result.to_pylist():
        values = [None if value is None else str(value) for value in row.values()]
        rows.append({"f": [{"v": value} for value in values]})
    answer = {"jobReference": job, "jobComplete": True, "schema": {"fields": fields}}
    return {**answer, "totalRows": str(len(rows)), "rows": rows}


def _job(name: str, job: dict[str, str]) -> dict[str, Any]:
    destination = _reference(PROJECT, "_anonymous", name)
    query = {"query": "", "destinationTable": destination}
    now = str(int(time.time() * 1000))
    return {
        "id": name,
        "jobReference": job,
        "status": {"state": "DONE"},
        "configuration": {"query": query, "jobType": "QUERY"},
        "statistics": {"creationTime": now, "query": {"statementType": "SELECT"}},
    }


def _reference(project: str, dataset: str, table: str) -> dict[str, str]:
    return {"projectId": project, "datasetId": dataset, "tableId": table}


class _Storage(grpc.GenericRpcHandler):
    def __init__(self, fake: FakeBigQuery) -> None:
        self._fake = fake

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        from google.cloud.bigquery_storage_v1 import types

        fake = self._fake
        method = handler_call_details.method.rpartition("/")[2]
        if method in fake.refused:
            return grpc.unary_unary_rpc_method_handler(
                lambda _, context: context.abort(*fake.refused[method])
            )
        match method:
            case "CreateReadSession":
                return grpc.unary_unary_rpc_method_handler(
                    lambda request, _: fake.open_session(request),
                    types.CreateReadSessionRequest.deserialize,
                    types.ReadSession.serialize,
                )
            case "ReadRows":
                return grpc.unary_stream_rpc_method_handler(
                    fake.rows, types.ReadRowsRequest.deserialize, types.ReadRowsResponse.serialize
                )
        return None
