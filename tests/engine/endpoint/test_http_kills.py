"""Kills during runs with an encoder behind HTTP: no row is lost, and few texts are sent twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.store import open_store
from tests.engine.endpoint.fault_server import MODEL, FaultServer
from tests.engine.runs import Output, in_memory
from tests.small_catalogs import assert_embedded, numbered_catalog, write_catalog
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("own_cache")]

KILLS = 20
B_MAX = 200


def test_20_killed_workers_cost_no_row(server: FaultServer, tmp_path: Path) -> None:
    endpoint = Endpoint(url=server.url, batch=11, concurrency=4)
    catalog = numbered_catalog([60] * (KILLS + 5))
    kills = 0

    with EncoderPool(EncodingSpec(MODEL, endpoint=endpoint)) as pool:
        output = Output(pool, tmp_path / "out")
        pool.start()
        server.bodies.clear()
        for _ in output.run(in_memory(catalog)):
            if kills < KILLS:
                until(lambda: pool.ready_workers)
                os.kill(pool.worker_pids[0], signal.SIGKILL)
                kills += 1

    assert kills == KILLS
    output.check_all(catalog)
    texts = {text for rows in catalog.values() for _, text in rows}
    sent = sum(text in texts for body in server.bodies for text in body["input"])
    assert sent <= len(texts) + KILLS * 4 * 10


def test_20_killed_runs_send_again_at_most_what_was_in_flight(
    server: FaultServer, tmp_path: Path
) -> None:
    catalog = numbered_catalog([60] * 100)
    write_catalog(tmp_path / "catalog", catalog)
    texts = {text for rows in catalog.values() for _, text in rows}

    for _ in range(KILLS):
        sent = sum(server.encoded[text] for text in texts)
        run = _start(server, tmp_path)
        until(lambda: sum(server.encoded[text] for text in texts) >= sent + 300)  # noqa: B023
        run.kill()
        run.wait()
    assert _start(server, tmp_path).wait() == 0

    [space] = list_spaces(open_store(tmp_path / "out"))
    for key, rows in catalog.items():
        assert_embedded(tmp_path / "out", space.name, key, rows)
    sent_again = sum(server.encoded[text] for text in texts) - len(texts)
    assert sent_again <= KILLS * 3 * B_MAX


def _start(server: FaultServer, folder: Path) -> subprocess.Popen[bytes]:
    bounds = ["--b-min", "100", "--first-b-min", "100", "--b-max", str(B_MAX)]
    requests = ["--encoder-url", server.url, "--encoder-batch", "21", "--encoder-concurrency", "2"]
    command = [sys.executable, "-m", "surge_dagster", "embed", "catalog", "out", "--quiet"]
    return subprocess.Popen([*command, "--model", MODEL, *requests, *bounds], cwd=folder)
