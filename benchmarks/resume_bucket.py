"""The same decisions in a bucket: requests and seconds, without a cache on disk and with the one of an earlier process.

The bucket is the tests' server, on this machine and written in Python: its seconds say how cold and warm compare, not
what a cloud takes. The requests are counted where they arrive.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.resume_outputs import SPACE, Decided, decide_in, partitions_of
from benchmarks.rounds import say
from surge_dagster.engine.store import open_store

SIDES = ("cold", "warm")


def measure_bucket(folder: Path, objects: int, rounds: int) -> dict[str, Any]:
    """Put the files of a local output into a bucket and let fresh processes decide.

    Args:
        folder: holds the output; caches are made beside it.
        objects: files there.
    """
    from tests.engine.store.object_server import BUCKET, ObjectServer  # needs the extra 'dev'

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for every request otherwise
    say(f"writing {objects:,} objects")
    samples: dict[str, list[tuple[Decided, int, int]]] = {side: [] for side in SIDES}
    with ObjectServer() as server:
        server.reset()
        environment = os.environ | {
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_ENDPOINT_URL": server.url,
        }
        url = f"s3://{BUCKET}/out"
        _run("put", url, objects, environment, folder)
        for number in range(rounds):
            environment["SURGE_CACHE_DIR"] = str(folder.with_name(f"cache-{number}"))
            for side in SIDES:
                server.log.clear()
                found = Decided(**json.loads(_run("decide", url, objects, environment, folder)))
                listings = sum("list-type" in target for target in server.requests("GET"))
                samples[side].append((found, listings, len(server.requests("GET")) - listings))
    return {"objects": objects} | {side: _row(found) for side, found in samples.items()}


def _row(found: list[tuple[Decided, int, int]]) -> dict[str, Any]:
    decided = [one for one, _, _ in found]
    return {
        "seconds": statistics.median(one.seconds for one in decided),
        "all_seconds": [one.seconds for one in decided],
        "cpu_seconds": statistics.median(one.cpu_seconds for one in decided),
        "listings": max(listings for _, listings, _ in found),
        "reads": max(reads for _, _, reads in found),
        "decided": {name: getattr(decided[0], name) for name in ("fresh", "stale", "missing")},
    }


def _run(what: str, url: str, objects: int, environment: dict[str, str], folder: Path) -> str:
    command = [sys.executable, "-m", "benchmarks.resume_bucket", what, url, str(objects), str(folder)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def put(url: str, folder: Path) -> None:
    """Copy every file of an output into a bucket."""
    store = open_store(url)
    for path in (folder / SPACE).iterdir():
        with store.create(f"{SPACE}/{path.name}") as upload:
            upload.sink.write(path.read_bytes())
            upload.publish(lambda: None)


def main() -> None:
    """One process of the measurement."""
    what, url, objects, folder = sys.argv[1:]
    if what == "put":
        put(url, Path(folder))
    else:
        print(json.dumps(asdict(decide_in(open_store(url), partitions_of(int(objects))))))


if __name__ == "__main__":
    main()
