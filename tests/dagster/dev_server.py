"""A real `dagster dev` (webserver, daemon and code server) that tests control over GraphQL, like
the UI."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# Processes that tests start find the backend of gated_backend.py and child_hooks/sitecustomize.py.
CHILD_PATH = f"{HERE}{os.pathsep}{HERE / 'child_hooks'}"
_SELECTOR = {"repositoryLocationName": "surge", "repositoryName": "__repository__"}
_SENSOR = {**_SELECTOR, "sensorName": "new_partitions"}
_MARK = "SURGE_TEST_SERVER"

T = TypeVar("T")


def eventually(what: str, look: Callable[[], T | None], *, seconds: float = 60) -> T:
    """Call a function until its result is true; `what` describes it after a timeout."""
    end = time.monotonic() + seconds
    while not (seen := look()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.5)  # each answer takes processor time of a server
    return seen


@dataclass(frozen=True, slots=True)
class DevServer:
    """The actions of an operator in the UI, as calls."""

    port: int
    folder: Path

    def ask(self, query: str, **variables: Any) -> Any:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

        assert "errors" not in answer, answer["errors"]
        return answer["data"]

    def _do(self, mutation: str, expected: str, **variables: Any) -> dict[str, Any]:
        """Return the result of a mutation, which is of the expected type."""
        [answer] = self.ask(mutation, **variables).values()
        assert answer["__typename"] == expected, answer
        return answer

    def launch(self, job: str) -> str:
        params = {
            "selector": {**_SELECTOR, "pipelineName": job},
            "runConfigData": "{}",
            "executionMetadata": {"tags": []},
        }
        mutation = """mutation($p: ExecutionParams!) { launchRun(executionParams: $p) {
            __typename ... on LaunchRunSuccess { run { runId } }
            ... on PythonError { message } } }"""
        return self._do(mutation, "LaunchRunSuccess", p=params)["run"]["runId"]

    def terminate(self, run_id: str) -> None:
        mutation = """mutation($r: String!) {
            terminateRun(runId: $r, terminatePolicy: SAFE_TERMINATE) { __typename } }"""
        self._do(mutation, "TerminateRunSuccess", r=run_id)

    def start_sensor(self) -> None:
        mutation = """mutation($s: SensorSelector!) { startSensor(sensorSelector: $s) {
            __typename ... on PythonError { message } } }"""
        self._do(mutation, "Sensor", s=_SENSOR)

    def stop_sensor(self) -> None:
        query = """query($s: SensorSelector!) { sensorOrError(sensorSelector: $s) {
            ... on Sensor { sensorState { id } } } }"""
        state = self.ask(query, s=_SENSOR)["sensorOrError"]["sensorState"]["id"]
        mutation = "mutation($i: String!) { stopSensor(id: $i) { __typename } }"
        self._do(mutation, "StopSensorMutationResult", i=state)

    def register_partitions(self) -> None:
        """Register new keys as a tick of the sensor does; no run is requested."""
        mutation = """mutation($s: SensorSelector!) { sensorDryRun(selectorData: $s, cursor: "") {
            __typename ... on DryRunInstigationTick {
                evaluationResult { error { message } } } } }"""
        self._do(mutation, "DryRunInstigationTick", s=_SENSOR)

    def launch_backfill(self, partition_keys: list[str]) -> str:
        params = {"assetSelection": [{"path": ["embeddings"]}], "partitionNames": partition_keys}
        mutation = """mutation($p: LaunchBackfillParams!) {
            launchPartitionBackfill(backfillParams: $p) { __typename
                ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
        return self._do(mutation, "LaunchBackfillSuccess", p=params)["backfillId"]

    def backfill(self, backfill_id: str) -> dict[str, Any]:
        """Wait for the end of a backfill; returns its status and its runs."""

        def ended() -> dict[str, Any] | None:
            query = """query($b: String!) { partitionBackfillOrError(backfillId: $b) {
                ... on PartitionBackfill { status runs { runId status } } } }"""
            seen = self.ask(query, b=backfill_id)["partitionBackfillOrError"]
            return None if seen["status"] in ("REQUESTED", "CANCELING") else seen

        return eventually("the end of a backfill", ended, seconds=100)

    def runs(self) -> list[dict[str, Any]]:
        query = """{ runsOrError { ... on Runs { results {
            runId status jobName parentRunId } } } }"""
        return self.ask(query)["runsOrError"]["results"]

    def status(self, run_id: str) -> str:
        [run] = [run for run in self.runs() if run["runId"] == run_id]
        return run["status"]

    def finished(self, run_id: str) -> str:
        """Wait for the end of a run; returns its status."""

        def ended() -> str | None:
            status = self.status(run_id)
            return status if status in ("SUCCESS", "FAILURE", "CANCELED") else None

        return eventually(f"the end of run {run_id}", ended, seconds=150)

    def retry_of(self, run_id: str) -> str:
        """Wait for the run that Dagster launches after a failed one; returns its id."""

        def launched() -> str | None:
            found = (run["runId"] for run in self.runs() if run["parentRunId"] == run_id)
            return next(found, None)

        return eventually(f"another run after {run_id}", launched)

    def checked(self) -> dict[str, str]:
        query = """{ assetCheckExecutions(assetKey: {path: ["embeddings"]}, limit: 1,
            checkName: "published_partitions_are_valid") { runId status } }"""
        return self.ask(query)["assetCheckExecutions"][0]

    def partitions(self) -> dict[str, list[str]]:
        """The partition bar of `embeddings`: all, materialized, failed, in progress."""
        query = """{ assetNodeOrError(assetKey: {path: ["embeddings"]}) { ... on AssetNode {
            partitionKeys assetPartitionStatuses { ... on DefaultPartitionStatuses {
                materializedPartitions failedPartitions materializingPartitions } } } } }"""
        node = self.ask(query)["assetNodeOrError"]
        bar = node["assetPartitionStatuses"]
        return {
            "all": node["partitionKeys"],
            "materialized": sorted(bar.get("materializedPartitions", [])),
            "failed": sorted(bar.get("failedPartitions", [])),
            "in progress": sorted(bar.get("materializingPartitions", [])),
        }

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """Materializations of a run in the order they were stored: asset, partition, numbers and
        texts of the metadata."""
        found: list[dict[str, Any]] = []
        fields = """... on MaterializationEvent { assetKey { path } partition metadataEntries {
            label ... on IntMetadataEntry { intValue } ... on TextMetadataEntry { text } } }"""
        for event in self._log(run_id, fields):
            if not event.get("assetKey"):
                continue
            entries = event["metadataEntries"]
            values = {e["label"]: e.get("intValue", e.get("text")) for e in entries}
            place = {"asset": event["assetKey"]["path"][-1], "partition": event["partition"]}
            found.append(place | values)
        return found

    def embedded(self, run_id: str) -> list[str]:
        """The partitions of `embeddings` that a run has materialized, in this order; without the
        event of the whole output, which ends a run."""
        events = [event for event in self.events(run_id) if event["asset"] == "embeddings"]
        return [event["partition"] for event in events if event["partition"] is not None]

    def encoded(self, run_id: str) -> int:
        """The number of texts that a run has encoded."""
        return sum(event.get("texts") or 0 for event in self.events(run_id))

    def logged(self, run_id: str) -> list[str]:
        """The lines that a run logged itself."""
        events = self._log(run_id, "... on LogMessageEvent { message }")
        return [event["message"] for event in events if event]

    def process(self, run_id: str) -> psutil.Process:
        fields = """... on EngineEvent { metadataEntries {
            label ... on TextMetadataEntry { text } } }"""
        events = self._log(run_id, fields)
        entries = [entry for event in events for entry in event.get("metadataEntries", ())]
        pid = next(entry["text"] for entry in entries if entry["label"] == "pid")
        return psutil.Process(int(pid))

    def _log(self, run_id: str, fields: str) -> list[dict[str, Any]]:
        query = """query($r: ID!) { logsForRun(runId: $r, limit: 1000) {
            ... on EventConnection { events { %s } } } }"""
        return self.ask(query % fields, r=run_id)["logsForRun"]["events"]

    def processes(self) -> list[psutil.Process]:
        """The living processes of this server and of its runs."""
        folder = str(self.folder)
        return [one for one in psutil.process_iter() if _environment(one).get(_MARK) == folder]

    def encoder_workers(self) -> list[psutil.Process]:
        """Living encoder processes that belong to this server's runs."""
        name = "surge_dagster.engine.encoder.worker.main"
        return [process for process in self.processes() if name in _command(process)]


@contextmanager
def dev_server(folder: Path, **settings: str) -> Iterator[DevServer]:
    """Start `dagster dev` in its own project folder; encoders use `gated_backend`.

    Args:
        settings: variables without `SURGE_`.
    """
    shutil.copy(ROOT / "workspace.yaml", folder / "workspace.yaml")
    (folder / "home").mkdir()
    instance = yaml.safe_load((ROOT / ".dagster" / "dagster.yaml").read_text())
    instance["concurrency"]["pools"]["default_limit"] = 1
    (folder / "home" / "dagster.yaml").write_text(yaml.safe_dump(instance))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As a script's `make ui &` starts it: with SIGINT ignored.
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, *_make_ui(port)]
    server = DevServer(port, folder)
    with (folder / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment_of(folder, settings),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        eventually("dagster dev answers", lambda: _answers(server, process), seconds=200)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        for left in server.processes():
            left.kill()


def _environment_of(folder: Path, settings: dict[str, str]) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("DAGSTER_")}
    found |= {f"SURGE_{name.upper()}": value for name, value in settings.items()}
    return found | {
        "SURGE_SOURCE": str(folder / "catalog"),
        "SURGE_OUTPUT": str(folder / "output"),
        "SURGE_MODEL": "hash://16",
        "DAGSTER_HOME": str(folder / "home"),
        "GATED_BACKEND": "1",
        _MARK: str(folder),
        "PYTHONPATH": CHILD_PATH,
    }


def _make_ui(port: int) -> list[str]:
    """The arguments with which `make ui` starts Python."""
    command = ["make", "--no-print-directory", "-n", "ui", f"PORT={port}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return shlex.split(shown.stdout.splitlines()[-1])[1:]


def _answers(server: DevServer, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, (server.folder / "dev.log").read_text()
    try:
        return bool(server.ask("{ version }"))
    except OSError:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}
