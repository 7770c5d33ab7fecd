"""A bucket with a latency: a folder of the disk behind the part of S3's API that a source uses, in its own process.

    python -m benchmarks.bucket_server FOLDER --latency 0.02

Every request is answered after the latency, as many at a time as are sent. moto is not used, because it takes
milliseconds of a core for each request, and the cores are those of what is measured. Prints its port; the process ends
when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen
from xml.sax.saxutils import escape

from aiohttp import web

_NAME = "bench"
_COUNTS = "requests"
_PAGE_KEYS = 1000


class BucketServer:
    """Answers LIST, GET and HEAD for the files of a folder, as they were when it was made."""

    def __init__(self, folder: Path, latency: float) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self._objects = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        self._keys = sorted(self._objects)
        self._etags = {key: f'"{hashlib.md5(content).hexdigest()}"' for key, content in self._objects.items()}
        self._latency = latency
        self.requests: Counter[str] = Counter()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a request after the latency."""
        key = request.match_info["key"]
        self.requests[request.method if key else "LIST"] += 1
        await asyncio.sleep(self._latency)
        if not key:
            return web.Response(body=self._listing(request).encode(), content_type="application/xml")
        content = self._objects.get(key)
        if content is None:
            return web.Response(status=404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": self._etags[key], "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        wanted = request.http_range
        if wanted.start is None and wanted.stop is None:
            return web.Response(headers=headers, body=content)
        start, stop, _ = wanted.indices(len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return web.Response(status=206, headers=headers, body=content[start:stop])

    def _listing(self, request: web.Request) -> str:
        prefix = request.query.get("prefix", "")
        first = bisect_left(self._keys, prefix)
        if token := request.query.get("continuation-token", ""):
            first = bisect_right(self._keys, token)
        page = [key for key in self._keys[first : first + _PAGE_KEYS] if key.startswith(prefix)]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(self._etags[key])}</ETag><Size>{len(self._objects[key])}</Size></Contents>"
            for key in page
        )
        end = "<IsTruncated>false</IsTruncated>"
        if len(page) == _PAGE_KEYS:
            token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
            end = f"<IsTruncated>true</IsTruncated>{token}"
        return f"<ListBucketResult>{end}{entries}</ListBucketResult>"

    async def counts(self, request: web.Request) -> web.Response:
        """The number of requests so far, by kind."""
        return web.json_response(self.requests)


@contextlib.contextmanager
def bucket_of(folder: Path, latency: float) -> Iterator[tuple[str, str]]:
    """Serve a folder as a bucket; gives its URL and the endpoint."""
    command = [sys.executable, "-m", "benchmarks.bucket_server", str(folder), "--latency", str(latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin
        assert server.stdout
        try:
            yield f"s3://{_NAME}", f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.stdin.close()


def requests_of(endpoint: str) -> dict[str, int]:
    """The number of requests that a server has received, by kind."""
    with urlopen(f"{endpoint}/{_COUNTS}") as answer:
        return json.load(answer)


async def _serve(folder: Path, latency: float) -> None:
    server = BucketServer(folder, latency)
    app = web.Application()
    app.router.add_get(f"/{_COUNTS}", server.counts)
    app.router.add_route("*", f"/{_NAME}{{_:/?}}{{key:.*}}", server.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


def main() -> None:
    """Parse and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds (0.02)")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.folder, arguments.latency))


if __name__ == "__main__":
    main()
