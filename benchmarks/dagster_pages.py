"""Dagster's UI on a large catalog: the partition page of `embeddings` in a browser, and each of its GraphQL queries.

A real `dagster dev` serves the instance that a refresh has filled. Chromium opens the page until it shows the
partitions; the queries that it sent are then sent again, one at a time and without a browser. Without Chromium only
the query for the statuses of all partitions, which this module knows, is measured.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.browser import NoBrowser, browser_page
from benchmarks.dagster_refresh import ROOT, Project
from benchmarks.harness import Document, Target, at_most, say

_QUERY_SECONDS = 2.0
_START_SECONDS = 120
_LOAD_MILLISECONDS = 180_000
_KNOWN = """query KnownPartitionQuery { assetNodeOrError(assetKey: {path: ["embeddings"]}) { ... on AssetNode {
    partitionStats { numPartitions numMaterialized numFailed numMaterializing }
    partitionKeysByDimension { name partitionKeys }
    assetPartitionStatuses { ... on DefaultPartitionStatuses {
        materializedPartitions failedPartitions materializingPartitions unmaterializedPartitions } } } } }"""


@dataclass(frozen=True, slots=True)
class _Webserver:
    """A running webserver, and the process that started it, its daemon and its code server."""

    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """CPU seconds of all these processes so far."""
        times = [each.cpu_times() for each in (self.process, *self.process.children(recursive=True))]
        return sum(each.user + each.system for each in times)


def pages_document(project: Project, rounds: int, picture: Path | None = None) -> Document:
    """Open the page, then send its queries again.

    Args:
        picture: where to write a screenshot of the page.
    """
    with _webserver(project) as server:
        queries: list[Document] = [{"operationName": "KnownPartitionQuery", "query": _KNOWN, "variables": {}}]
        found: Document = {"partitions": project.refreshed["partitions"]}
        say("  the page")
        try:
            loads = [
                _load(f"{server.url}/assets/embeddings?view=partitions", found["partitions"], picture)
                for _ in range(rounds)
            ]
            found["page_seconds"] = [seconds for seconds, _ in loads]
            queries += loads[-1][1]
        except NoBrowser as error:
            found["missing"] = str(error)
        say(f"  its {len(queries)} queries")
        found["queries"] = [_query(server, query, rounds) for query in queries]
    return found


def pages_targets(found: Document) -> Iterator[Target]:
    """The aims of the scenario."""
    partitions = f"{found['partitions']:,} partitions"
    missing = found.get("missing", "")
    slowest = None if missing else max(row["seconds"] for row in found["queries"])
    yield at_most(f"s for all statuses of {partitions}", _QUERY_SECONDS, found["queries"][0]["seconds"])
    yield at_most(f"s for the page's slowest query, {partitions}", _QUERY_SECONDS, slowest, note=missing)


def pages_lines(found: Document) -> Iterator[str]:
    """The table."""
    yield ""
    if "missing" in found:
        yield found["missing"]
    else:
        yield f"page with {found['partitions']:,} partitions, seconds until they are shown: " + ", ".join(
            f"{seconds:.1f}" for seconds in found["page_seconds"]
        )
    yield f"{'query of the page':40}{'s':>8}{'CPU s':>8}{'kB':>10}"
    for row in sorted(found["queries"], key=lambda row: -row["seconds"]):
        yield f"{row['name']:40}{row['seconds']:>8.2f}{row['cpu_seconds']:>8.2f}{row['bytes'] / 1e3:>10,.1f}"


@contextmanager
def _webserver(project: Project) -> Iterator[_Webserver]:
    shutil.copy(ROOT / "workspace.yaml", project.folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dagster", "dev", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", str(port)]
    with (project.folder / "dev.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=project.folder, env=project.environment, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + _START_SECONDS
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError((project.folder / "dev.log").read_text()[-2000:])
                time.sleep(0.2)
            yield _Webserver(url, psutil.Process(process.pid))
        finally:
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:  # where the parent process ignores interrupts
                process.kill()
                process.wait()
            for left in psutil.wait_procs(below, timeout=20)[1]:
                left.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=10):
            return True
    except OSError:
        return False


def _load(url: str, partitions: int, picture: Path | None) -> tuple[float, list[Document]]:
    """Seconds until the page shows the partitions, and the queries that it has sent by then."""
    sent: dict[str, Document] = {}
    with browser_page() as page:
        page.on("request", lambda request: sent.update(_named(request.post_data) if "/graphql" in request.url else {}))
        begun = time.perf_counter()
        page.goto(url, wait_until="commit")
        page.get_by_text(f"{partitions:,}").first.wait_for(timeout=_LOAD_MILLISECONDS)
        seconds = time.perf_counter() - begun
        page.wait_for_load_state("networkidle", timeout=_LOAD_MILLISECONDS)
        if picture is not None:
            page.screenshot(path=picture)
    return seconds, list(sent.values())


def _named(body: str | None) -> dict[str, Document]:
    query = json.loads(body or "{}")
    return {query["operationName"]: query} if "operationName" in query else {}


def _query(server: _Webserver, query: Document, rounds: int) -> Document:
    name, body = query["operationName"], json.dumps(query).encode()
    seconds, cpu, size = list[float](), list[float](), 0
    for _ in range(rounds):
        request = urllib.request.Request(f"{server.url}/graphql", body, {"Content-Type": "application/json"})
        begun, cpu_begun = time.perf_counter(), server.cpu_seconds()
        with urllib.request.urlopen(request, timeout=300) as response:
            content = response.read()
        seconds.append(time.perf_counter() - begun)
        cpu.append(server.cpu_seconds() - cpu_begun)
        size = len(content)
        if b'"errors"' in content[:200]:
            raise RuntimeError(f"{name}: {content[:500].decode(errors='replace')}")
    return {"name": name, "seconds": statistics.median(seconds), "cpu_seconds": statistics.median(cpu), "bytes": size}
