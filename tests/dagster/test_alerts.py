"""Alerts say what failed to whoever listens; what listens never harms what runs, and secrets are told to nobody."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import dagster as dg
import pytest
from dagster._core.definitions.run_status_sensor_definition import _get_run_status_sensor_process_limit
from dagster._grpc.client import DEFAULT_SENSOR_GRPC_TIMEOUT
from dagster_slack import SlackResource
from slack_sdk.web.client import WebClient

from surge_dagster.alerts import PATIENCE_SECONDS, Alert, Deliveries, NotDelivered, Webhook
from surge_dagster.automation.alert_sensors import WAIT_SECONDS_PER_TICK
from surge_dagster.definitions import embedding_catalog
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.settings import load_settings
from surge_dagster.slack_alerts import SlackAlerts
from tests.dagster.conftest import NAMES, Workbench
from tests.dagster.dev_server import DevServer, dev_server, eventually
from tests.small_catalogs import write_partition

SECRET = "hunter2"
ALERT = Alert("shop", "run_failed", "r1", "it failed", ("a", "b"), 3, "http://ui/runs/r1")


@dataclass
class Listener:
    """An HTTP server that keeps what is posted to it; `status` and `answer` are what it says."""

    posted: list[tuple[str, bytes]] = field(default_factory=list)
    status: int = 200
    answer: dict[str, Any] = field(default_factory=lambda: {"ok": True})
    silent: threading.Event | None = None  # set when it may answer
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{SECRET}"

    def alerts(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.posted]


@pytest.fixture
def listener() -> Iterator[Listener]:
    kept = Listener()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            if kept.silent is not None:
                kept.silent.wait(60)
            body = json.dumps(kept.answer).encode()
            self.send_response(kept.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Location", f"http://127.0.0.1:{kept.port}/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield kept
        if kept.silent is not None:
            kept.silent.set()
        server.shutdown()
        thread.join()


class Ticks:
    """A sensor with the cursor that Dagster keeps for it."""

    def __init__(self, bench: Workbench, name: str, definitions: dg.Definitions | None = None) -> None:
        self._bench = bench
        self._sensor = (definitions or bench.definitions).get_repository_def().get_sensor_def(name)
        self._cursor: str | None = None

    def look(self) -> str | None:
        with dg.build_sensor_context(self._bench.instance, self._cursor) as context:
            found = self._sensor.evaluate_tick(context)
        self._cursor = found.cursor
        return found.skip_message


def test_a_failed_run_is_told_with_its_partitions_once(bench: Workbench, listener: Listener) -> None:
    bench.settings |= {"alert_webhook": listener.url, "webserver_url": "http://ui/"}
    bench.write("good")
    for number in range(25):
        bench.write(f"bad{number:02}", [("x", None)])
    ticks = Ticks(bench, NAMES.failure_alerts)
    ticks.look()  # what was before is not news
    ran = bench.refresh()
    assert not ran.success
    ticks.look()
    ticks.look()
    [told] = listener.alerts()
    assert (told["catalog"], told["kind"], told["run_id"]) == ("", "run_failed", ran.run_id)
    assert told["link"] == f"http://ui/runs/{ran.run_id}"
    assert (told["failed_count"], told["failed_partitions"]) == (25, [f"bad{number:02}" for number in range(20)])
    assert told["message"].startswith("catalog_refresh failed.\n25 partitions failed") and "bad00" in told["message"]
    assert "and 5 more" in told["text"] and told["link"] in told["text"]


def test_runs_that_will_be_launched_again_and_those_of_others_are_not_told(bench: Workbench) -> None:
    told: list[Alert] = []
    definitions = dg.Definitions.merge(
        *(embedding_catalog(name=name, source="c", output="o", alerts=[told.append]) for name in ("shop", "docs")),
        dg.Definitions(
            jobs=[
                dg.define_asset_job("ours", selection=[CatalogNames("shop").embeddings]),
                dg.define_asset_job("our_switch", selection=[CatalogNames("shop").current_space]),
                dg.define_asset_job("theirs", selection=[CatalogNames("docs").embeddings]),
            ]
        ),
    )
    names = CatalogNames("shop")
    ticks = Ticks(bench, names.failure_alerts, definitions)
    ticks.look()

    def fail(job: str, **how: Any) -> str:
        run = bench.instance.create_run_for_job(definitions.get_repository_def().get_job(job), **how)
        bench.instance.report_run_failed(run, "The process is gone.")
        return run.run_id

    for_good = {"dagster/max_retries": "0"}
    in_the_ui = definitions.resolve_implicit_global_asset_job_def()
    fail(names.refresh_job)
    fail("docs_catalog_refresh", tags=for_good)
    fail(in_the_ui.name, tags=for_good, asset_selection=frozenset({CatalogNames("docs").embeddings}))
    check = fail(names.check_job, tags=for_good)
    chosen = fail(in_the_ui.name, tags=for_good, asset_selection=frozenset({names.embeddings}))
    fail("theirs", tags=for_good)
    own = [fail(job, tags=for_good) for job in ("ours", "our_switch")]
    for _ in range(8):
        ticks.look()
    assert [(alert.catalog, alert.run_id, alert.failed_count) for alert in told] == [
        ("shop", run_id, 0) for run_id in (check, chosen, *own)
    ]
    assert told[0].message == "shop_catalog_check failed.\nThe process is gone." and told[0].link is None


def test_a_slow_superbatch_is_told_once_for_its_run(bench: Workbench, listener: Listener) -> None:
    """Takes a device that is slow for two seconds: nothing shorter is worth an alert."""
    bench.settings |= {
        "alert_webhook": listener.url,
        "backend": "gated_backend:GatedBackend",
        "b_min": 20,
        "b_max": 20,
    }
    ticks = Ticks(bench, NAMES.slow_alerts)
    ticks.look()
    for key in "abcd":
        bench.write(key, 20)
    bench.write("slow", [("x", "take 2"), *[(f"y{row}", "quick") for row in range(19)]])
    ran = bench.refresh()
    assert ran.success
    told = ticks.look()
    assert told == "5 SuperBatches, 1 of them slow"
    ticks.look()
    [alert] = listener.alerts()
    assert (alert["kind"], alert["run_id"], alert["failed_count"]) == ("slow_superbatch", ran.run_id, 0)
    assert "1 SuperBatches were slow. SuperBatch 4 with 20 texts took" in alert["message"]


def test_without_anybody_to_tell_there_is_no_sensor(bench: Workbench) -> None:
    repository = bench.definitions.get_repository_def()
    assert not repository.has_sensor_def(NAMES.failure_alerts) and not repository.has_sensor_def(NAMES.slow_alerts)


class TestDelivery:
    def test_a_hook_that_fails_or_hangs_is_logged_and_the_others_are_called(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        told: list[Alert] = []
        never = threading.Event()

        def failing(alert: Alert) -> None:
            raise RuntimeError("no")

        def hanging(alert: Alert) -> None:
            never.wait(60)

        Deliveries([failing, hanging, told.append]).deliver(ALERT, logging.getLogger(), patience_seconds=0.5)
        never.set()
        assert told == [ALERT]
        assert "failing failed on run r1: RuntimeError: no" in caplog.text
        assert "hanging has not returned after 0.5 s" in caplog.text

    def test_a_hook_that_hangs_is_passed_over_until_it_returns(self, caplog: pytest.LogCaptureFixture) -> None:
        begun: list[str] = []
        told: list[str] = []
        gate = threading.Event()

        def hanging(alert: Alert) -> None:
            begun.append(alert.run_id)
            gate.wait(60)

        deliveries = Deliveries([hanging, lambda alert: told.append(alert.run_id)])

        def deliver(run_id: str, patience_seconds: float = 60.0) -> None:
            alert = replace(ALERT, run_id=run_id)
            deliveries.deliver(alert, logging.getLogger(), patience_seconds=patience_seconds)

        for run_id in ("r1", "r2", "r3"):
            deliver(run_id, patience_seconds=0.5)
        assert (begun, told) == (["r1"], ["r1", "r2", "r3"])
        assert "hanging has not returned from an earlier alert; it is not told of run r3" in caplog.text
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "surge-alert":
                thread.join(60)
        deliver("r4")
        assert (begun, told) == (["r1", "r4"], ["r1", "r2", "r3", "r4"])

    def test_a_hook_that_is_only_slow_is_told_of_everything(self) -> None:
        told: list[str] = []
        gate = threading.Event()

        def slow(alert: Alert) -> None:
            gate.wait(60)
            told.append(alert.run_id)

        deliveries = Deliveries([slow])
        deliveries.deliver(ALERT, logging.getLogger(), patience_seconds=0.05)
        threading.Timer(0.2, gate.set).start()
        deliveries.deliver(replace(ALERT, run_id="r2"), logging.getLogger(), patience_seconds=60)
        assert told == ["r1", "r2"]

    def test_hooks_that_take_as_long_as_they_may_leave_a_tick_in_time(self) -> None:
        """Dagster does one that is late again from the start: whoever was told is told again."""
        alerts_of_a_tick = _get_run_status_sensor_process_limit()
        assert alerts_of_a_tick * PATIENCE_SECONDS <= WAIT_SECONDS_PER_TICK <= DEFAULT_SENSOR_GRPC_TIMEOUT / 2

    @pytest.mark.parametrize("wrong", ["nobody", "error", "redirection", "silence"])
    def test_a_webhook_that_does_not_take_it_is_told_without_its_address(
        self, listener: Listener, caplog: pytest.LogCaptureFixture, wrong: str
    ) -> None:
        listener.status = {"error": 500, "redirection": 307}.get(wrong, 200)
        listener.silent = threading.Event() if wrong == "silence" else None
        url = f"http://127.0.0.1:1/{SECRET}" if wrong == "nobody" else listener.url
        hook = Webhook(url, timeout_seconds=0.5)
        with pytest.raises(NotDelivered) as refused:
            hook(ALERT)
        Deliveries([hook]).deliver(ALERT, logging.getLogger())
        assert "the alert hook Webhook failed on run r1: NotDelivered: the webhook" in caplog.text
        shown = str(refused.getrepr(style="native")) + caplog.text + repr(hook)
        assert SECRET not in shown
        assert all(path == f"/{SECRET}" for path, _ in listener.posted), "redirections are not followed"

    def test_slack_gets_it_in_its_channel(self, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
        class LocalSlack(SlackResource):
            def get_client(self) -> WebClient:
                return WebClient(self.token, base_url=f"http://127.0.0.1:{listener.port}/api/")

        monkeypatch.setenv("SLACK_TOKEN_OF_THE_TEST", SECRET)
        hook = SlackAlerts(LocalSlack(token=dg.EnvVar("SLACK_TOKEN_OF_THE_TEST")), "#embeddings")
        hook(ALERT)
        [(path, body)] = listener.posted
        sent = json.loads(body) if body.startswith(b"{") else {k: v[0] for k, v in parse_qs(body.decode()).items()}
        assert (path, sent["channel"], sent["text"]) == ("/api/chat.postMessage", "#embeddings", ALERT.text)
        listener.answer = {"ok": False, "error": "not_in_channel"}
        with pytest.raises(NotDelivered, match="not_in_channel") as refused:
            hook(ALERT)
        assert SECRET not in str(refused.getrepr(style="native")) + repr(hook)


@pytest.mark.parametrize("given", [f"ftp://h/{SECRET}", SECRET, [SECRET]])
def test_a_webhook_that_cannot_be_one_is_refused_without_being_shown(given: Any) -> None:
    with pytest.raises(Exception, match="alert_webhook") as refused:
        load_settings(alert_webhook=given)
    assert SECRET not in str(refused.getrepr(style="native"))


def ticks_of(server: DevServer, sensor: str) -> list[str]:
    """How the ticks of a sensor ended, the newest first."""
    selector = {"repositoryLocationName": "surge", "repositoryName": "__repository__", "sensorName": sensor}
    query = """query($s: SensorSelector!) { sensorOrError(sensorSelector: $s) {
        ... on Sensor { sensorState { ticks(limit: 10) { status } } } } }"""
    found = server.ask(query, s=selector)["sensorOrError"]["sensorState"]["ticks"]
    return [tick["status"] for tick in found]


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_on_a_real_server_a_failed_run_is_told_and_the_address_is_written_nowhere(
    listener: Listener, tmp_path: Path
) -> None:
    """Takes a minute: the sensor looks every 30 s. The one who listens answers with an error, which is logged."""
    listener.status = 500
    write_partition(tmp_path / "catalog", "bad", [("x", None)])
    settings = {"source": str(tmp_path / "catalog"), "output": str(tmp_path / "output"), "model": "hash://16"}
    with dev_server(tmp_path, alert_webhook=listener.url, **settings) as server:
        eventually("the first tick", lambda: ticks_of(server, NAMES.failure_alerts), seconds=90)
        run_id = server.launch(NAMES.refresh_job)
        assert server.finished(run_id) == "FAILURE"
        eventually("the alert", lambda: listener.posted, seconds=90)
        eventually("the tick that told it", lambda: "SUCCESS" in ticks_of(server, NAMES.failure_alerts))
    [told] = listener.alerts()
    assert (told["kind"], told["run_id"], told["failed_partitions"]) == ("run_failed", run_id, ["bad"])
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"the webhook answered 500" in path.read_bytes() for path in kept)
    assert [path for path in kept if SECRET.encode() in path.read_bytes()] == []
