"""What listing a bucket costs a client: a server that answers at once, in a process of its own.

Usage of the server: python -m benchmarks.listed_bucket, which prints its address in a line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from benchmarks.harness import seconds_of
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.object_client import StorageOptions

_PAGE = 1_000  # keys of an answer of S3, at most
_OBJECT = (
    "<Contents><Key>out/space/category-{:06}.parquet</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    '<ETag>"0123456789abcdef0123456789abcdef"</ETag><Size>4096</Size></Contents>'
)


def listing_seconds(counts: Sequence[int]) -> dict[int, float]:
    """Seconds to list buckets of so many files, beside what a bucket takes for its answers, one for
    1,000 of them."""
    command = [sys.executable, "-m", "benchmarks.listed_bucket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            options = StorageOptions(
                endpoint=server.stdout.readline().strip(),
                access_key_id="any",
                secret_access_key="any",
            )
            stores = {count: open_store(f"s3://objects-{count}/out", options) for count in counts}
            return {
                count: seconds_of(lambda s=store: OutputState(s, "space"))
                for count, store in stores.items()
            }
        finally:
            server.kill()


class _Pages(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """A page of ListObjectsV2; the bucket's name says how many objects it has."""
        asked = urlsplit(self.path)
        count = int(asked.path.strip("/").removeprefix("objects-"))
        first = int(parse_qs(asked.query).get("continuation-token", ["0"])[0])
        after = min(first + _PAGE, count)
        more = (
            f"<IsTruncated>true</IsTruncated><NextContinuationToken>{after}</NextContinuationToken>"
        )
        objects = "".join(map(_OBJECT.format, range(first, after)))
        end = more if after < count else "<IsTruncated>false</IsTruncated>"
        body = f"<ListBucketResult>{end}{objects}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A line for each page would be noise."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as served:
        print(f"http://127.0.0.1:{served.server_port}", flush=True)
        served.serve_forever()
