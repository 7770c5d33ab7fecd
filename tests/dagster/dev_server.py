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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
FINISHED = ("SUCCESS", "FAILURE", "CANCELED")
_SELECTOR = {"repositoryLocationName": "surge", "repositoryName": "__repository__"}
_MARK = "SURGE_TEST_SERVER"
MARK = "SURGE_TEST_MARK"  # of other processes that tests start

T = TypeVar("T")


def eventually(what: str, look: Callable[[], T | None], *, seconds: float = 60) -> T:
    """Call a function until its result is true; `what` describes it in the error after a timeout."""
    end = time.monotonic() + seconds
    while not (seen := look()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.5)  # each answer takes processor time of a server
    return seen


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What Dagster records about a run; times are seconds of the epoch."""

    id: str
    status: str
    tags: Mapping[str, str]
    keys: tuple[str, ...]  # partitions that its config names
    parent: str | None  # the run that it continues
    created: float
    started: float | None
    ended: float | None


def most_concurrent(runs: Sequence[RunRecord]) -> int:
    spans = [(run.started, run.ended) for run in runs if run.started and run.ended]
    return max(sum(begun <= moment < ended for begun, ended in spans) for moment, _ in spans)


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

    def launch(self, job: str, config: dict[str, Any] | None = None) -> str:
        params = {
            "selector": {**_SELECTOR, "pipelineName": job},
            "runConfigData": json.dumps(config or {}),
            "executionMetadata": {"tags": []},
        }
        query = """mutation($p: ExecutionParams!) { launchRun(executionParams: $p) {
            __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
        answer = self.ask(query, p=params)["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return answer["run"]["runId"]

    def retry_of(self, run_id: str) -> str:
        """Wait for the run that Dagster launches after a failed one; returns its id."""

        def look() -> str | None:
            query = "{ runsOrError { ... on Runs { results { runId parentRunId } } } }"
            runs = self.ask(query)["runsOrError"]["results"]
            return next((run["runId"] for run in runs if run["parentRunId"] == run_id), None)

        return eventually(f"another run after {run_id}", look)

    def launch_backfill(self, partition_keys: list[str]) -> str:
        params = {"assetSelection": [{"path": ["embeddings"]}], "partitionNames": partition_keys}
        query = """mutation($p: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $p) {
            __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
        answer = self.ask(query, p=params)["launchPartitionBackfill"]
        assert answer["__typename"] == "LaunchBackfillSuccess", answer
        return answer["backfillId"]

    def backfill(self, backfill_id: str, *, seconds: float = 100) -> dict[str, Any]:
        return eventually(
            "the end of a backfill", lambda: self._backfill_if_ended(backfill_id), seconds=seconds
        )

    def _backfill_if_ended(self, backfill_id: str) -> dict[str, Any] | None:
        query = """query($b: String!) { partitionBackfillOrError(backfillId: $b) {
            ... on PartitionBackfill { status runs { runId status } } } }"""
        seen = self.ask(query, b=backfill_id)["partitionBackfillOrError"]
        return None if seen["status"] in ("REQUESTED", "CANCELING") else seen

    def sensor(self, on: bool) -> None:
        selector = {**_SELECTOR, "sensorName": "new_partitions"}
        if on:
            query = """mutation($s: SensorSelector!) { startSensor(sensorSelector: $s) {
                __typename ... on PythonError { message } } }"""
            answer = self.ask(query, s=selector)["startSensor"]
            assert answer["__typename"] == "Sensor", answer
            return
        query = "query($s: SensorSelector!) { sensorOrError(sensorSelector: $s) { ... on Sensor { sensorState { id } } } }"
        state = self.ask(query, s=selector)["sensorOrError"]["sensorState"]["id"]
        answer = self.ask("mutation($i: String!) { stopSensor(id: $i) { __typename } }", i=state)[
            "stopSensor"
        ]
        assert answer["__typename"] == "StopSensorMutationResult", answer

    def keys_of_a_tick(self) -> list[str]:
        """Partitions that the sensor would request now; requests no run, and registers new keys as
        a tick does."""
        query = """mutation($s: SensorSelector!) { sensorDryRun(selectorData: $s, cursor: "") {
            ... on DryRunInstigationTick { evaluationResult { error { message } runRequests { runConfigYaml } } } } }"""
        tick = self.ask(query, s={**_SELECTOR, "sensorName": "new_partitions"})["sensorDryRun"][
            "evaluationResult"
        ]
        assert not tick["error"], tick["error"]
        return [
            key
            for request in tick["runRequests"] or ()
            for key in _named_keys(request["runConfigYaml"])
        ]

    def terminate(self, run_id: str) -> None:
        query = "mutation($r: String!) { terminateRun(runId: $r, terminatePolicy: SAFE_TERMINATE) { __typename } }"
        answer = self.ask(query, r=run_id)["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess", answer

    def run(self, run_id: str) -> dict[str, Any]:
        query = "query($r: ID!) { runOrError(runId: $r) { ... on Run { status jobName tags { key value } } } }"
        found = self.ask(query, r=run_id)["runOrError"]
        return {**found, "tags": {tag["key"]: tag["value"] for tag in found["tags"]}}

    def checked(self) -> dict[str, str]:
        query = """{ assetCheckExecutions(assetKey: {path: ["embeddings"]}, limit: 1,
            checkName: "published_partitions_are_valid") { runId status } }"""
        return self.ask(query)["assetCheckExecutions"][0]

    def process(self, run_id: str) -> psutil.Process:
        query = """query($r: ID!) { logsForRun(runId: $r, limit: 100) { ... on EventConnection { events {
            ... on EngineEvent { metadataEntries { label ... on TextMetadataEntry { text } } } } } } }"""
        events = self.ask(query, r=run_id)["logsForRun"]["events"]
        entries = [entry for event in events for entry in event.get("metadataEntries", ())]
        return psutil.Process(
            int(next(entry["text"] for entry in entries if entry["label"] == "pid"))
        )

    def runs(self) -> list[dict[str, Any]]:
        return self.ask("{ runsOrError { ... on Runs { results { runId status jobName } } } }")[
            "runsOrError"
        ]["results"]

    def records(self) -> list[RunRecord]:
        """All runs, in the order in which they were created."""
        query = """{ runsOrError { ... on Runs { results { runId status parentRunId runConfigYaml
            creationTime startTime endTime tags { key value } } } } }"""
        found = [
            RunRecord(
                id=run["runId"],
                status=run["status"],
                tags={tag["key"]: tag["value"] for tag in run["tags"]},
                keys=_named_keys(run["runConfigYaml"]),
                parent=run["parentRunId"],
                created=run["creationTime"],
                started=run["startTime"],
                ended=run["endTime"],
            )
            for run in self.ask(query)["runsOrError"]["results"]
        ]
        return sorted(found, key=lambda run: run.created)

    def finished(self, run_id: str) -> str:
        return eventually(
            f"the end of run {run_id}", lambda: _if_final(self.run(run_id)["status"]), seconds=150
        )

    def partitions(self) -> dict[str, list[str]]:
        """The partition bar of `embeddings`: all, materialized, failed, in progress."""
        query = """{ assetNodeOrError(assetKey: {path: ["embeddings"]}) { ... on AssetNode { partitionKeys
            assetPartitionStatuses { ... on DefaultPartitionStatuses {
                materializedPartitions failedPartitions materializingPartitions } } } } }"""
        node = self.ask(query)["assetNodeOrError"]
        bar = node["assetPartitionStatuses"]
        names = {
            "materialized": "materializedPartitions",
            "failed": "failedPartitions",
            "in progress": "materializingPartitions",
        }
        return {
            "all": node["partitionKeys"],
            **{short: sorted(bar.get(long, [])) for short, long in names.items()},
        }

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """Materializations of a run in the order they were stored: asset, partition, numbers in the
        metadata."""
        query = """query($r: ID!) { logsForRun(runId: $r, limit: 1000) { ... on EventConnection { events {
            ... on MaterializationEvent { assetKey { path } partition
                metadataEntries { label ... on IntMetadataEntry { intValue } ... on BoolMetadataEntry { boolValue } } }
            } } } }"""
        found = [
            event
            for event in self.ask(query, r=run_id)["logsForRun"]["events"]
            if event.get("assetKey")
        ]
        return [
            {
                "asset": event["assetKey"]["path"][-1],
                "partition": event["partition"],
                **{
                    e["label"]: e.get("intValue", e.get("boolValue"))
                    for e in event["metadataEntries"]
                },
            }
            for event in found
        ]

    def logged(self, run_id: str) -> list[str]:
        """The lines that a run logged itself."""
        query = """query($r: ID!) { logsForRun(runId: $r, limit: 1000) { ... on EventConnection { events {
            ... on LogMessageEvent { message } } } } }"""
        events = self.ask(query, r=run_id)["logsForRun"]["events"]
        return [event["message"] for event in events if event]

    def encoded(self, run_id: str) -> int:
        return sum(
            event.get("texts") or 0
            for event in self.events(run_id)
            if event["asset"] == "superbatches"
        )

    def encoder_workers(self) -> list[psutil.Process]:
        """Living encoder processes that belong to this server's runs."""
        name = "surge_dagster.engine.encoder.worker.main"
        return [process for process in self.processes() if name in _command(process)]

    def processes(self) -> list[psutil.Process]:
        return processes_with(_MARK, str(self.folder))


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    return [
        process for process in psutil.process_iter() if _environment(process).get(variable) == value
    ]


@contextmanager
def dev_server(
    folder: Path, pool_limit: int = 1, gated: bool = False, postgres: str = "", /, **settings: str
) -> Iterator[DevServer]:
    """Start `dagster dev` in its own project folder; `settings` are variables without `SURGE_`.

    Args:
        postgres: URL of the database that keeps runs and events; "" is SQLite.
    """
    settings = {
        "source": str(folder / "catalog"),
        "output": str(folder / "output"),
        "model": "hash://16",
        **settings,
    }
    shutil.copy(ROOT / "workspace.yaml", folder / "workspace.yaml")
    (folder / "home").mkdir()
    instance = yaml.safe_load((ROOT / ".dagster" / "dagster.yaml").read_text())
    instance["concurrency"]["pools"]["default_limit"] = pool_limit
    if postgres:
        del instance["event_log_storage"]
        instance["storage"] = {"postgres": {"postgres_url": postgres}}
    (folder / "home" / "dagster.yaml").write_text(yaml.safe_dump(instance))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("DAGSTER_")
    }
    environment |= {f"SURGE_{name.upper()}": value for name, value in settings.items()}
    environment |= {
        "DAGSTER_HOME": str(folder / "home"),
        _MARK: str(folder),
        "PYTHONPATH": CHILD_PATH,
    }
    if gated:
        environment["GATED_BACKEND"] = "1"
    # As a script's `make ui &` starts it: with SIGINT ignored.
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, *_make_ui(port)]
    server = DevServer(port, folder)
    with (folder / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
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


def _make_ui(port: int) -> list[str]:
    """The arguments with which `make ui` starts Python."""
    shown = subprocess.run(
        ["make", "--no-print-directory", "-n", "ui", f"PORT={port}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return shlex.split(shown.stdout.splitlines()[-1])[1:]


def _named_keys(run_config: str) -> tuple[str, ...]:
    ops = (yaml.safe_load(run_config) or {}).get("ops", {})
    return tuple(key for op in ops.values() for key in op["config"].get("keys", ()))


def _if_final(status: str) -> str | None:
    return status if status in FINISHED else None


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
