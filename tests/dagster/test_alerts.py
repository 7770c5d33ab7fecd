"""Tests of alerts: what is posted for which runs, and that nothing shows the URL."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.definitions.selector import InstigatorSelector
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.scheduler.instigation import TickData, TickStatus
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster_shared.error import SerializableErrorInfo

from surge_dagster.automation import alerts
from surge_dagster.automation.alerts import failure_text
from surge_dagster.config.settings import load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.orchestration.names import CatalogNames
from tests.dagster.conftest import NAMES, Workbench

SECRET = "hunter2"


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

    def __init__(
        self, bench: Workbench, name: str, definitions: dg.Definitions | None = None
    ) -> None:
        self._bench = bench
        self._sensor = (definitions or bench.definitions).get_repository_def().get_sensor_def(name)
        self._cursor: str | None = None

    def look(self) -> str | None:
        with dg.build_sensor_context(self._bench.instance, self._cursor) as context:
            found = self._sensor.evaluate_tick(context)
        self._cursor = found.cursor
        return found.skip_message


def test_a_failed_run_is_posted_once_with_its_partitions(
    bench: Workbench, listener: Listener
) -> None:
    bench.settings["alert_webhook"] = listener.url
    bench.write("good")
    for number in range(25):
        bench.write(f"bad{number:02}", [("x", None)])
    ticks = Ticks(bench, NAMES.failure_alerts)
    ticks.look()  # runs that failed before the first tick are not posted
    ran = bench.refresh()
    assert not ran.success
    ticks.look()
    ticks.look()
    [alert] = listener.alerts()
    assert (alert["catalog"], alert["run_id"]) == ("", ran.run_id)
    assert (alert["failed_count"], alert["failed_partitions"]) == (
        25,
        [f"bad{number:02}" for number in range(20)],
    )
    assert (
        alert["message"].startswith("catalog_refresh failed.\n25 partitions failed")
        and "bad00" in alert["message"]
    )
    assert "and 5 more" in alert["text"] and ran.run_id in alert["text"]


def test_runs_that_are_launched_again_are_not_posted_and_others_once_for_their_catalog(
    bench: Workbench, listener: Listener
) -> None:
    shop, docs = CatalogNames("shop"), CatalogNames("docs")
    definitions = dg.Definitions.merge(
        embedding_catalog(name="shop", source="c", output="o", alert_webhook=listener.url),
        embedding_catalog(name="docs", source="c", output="o", alert_webhook=listener.url),
        dg.Definitions(
            jobs=[
                dg.define_asset_job("ours", selection=[shop.embeddings]),
                dg.define_asset_job("theirs", selection=[docs.embeddings]),
            ]
        ),
    )
    ticks = [Ticks(bench, names.failure_alerts, definitions) for names in (shop, docs)]
    for each in ticks:
        each.look()

    def fail(job: str, **how: Any) -> str:
        run = bench.instance.create_run_for_job(
            definitions.get_repository_def().get_job(job), **how
        )
        bench.instance.report_run_failed(run, "The process is gone.")
        return run.run_id

    for_good = {"dagster/max_retries": "0"}
    in_the_ui = definitions.resolve_implicit_global_asset_job_def()
    fail(shop.refresh_job)
    of_docs = [fail(docs.refresh_job, tags=for_good)]
    of_docs.append(
        fail(in_the_ui.name, tags=for_good, asset_selection=frozenset({docs.embeddings}))
    )
    check = fail(shop.check_job, tags=for_good)
    chosen = fail(in_the_ui.name, tags=for_good, asset_selection=frozenset({shop.embeddings}))
    of_docs.append(fail("theirs", tags=for_good))
    own = [fail(job, tags=for_good) for job in ("ours", shop.switch_job)]
    for each in ticks * 8:
        each.look()
    posted = sorted(listener.alerts(), key=lambda alert: alert["catalog"] != "shop")
    assert [(alert["catalog"], alert["run_id"], alert["failed_count"]) for alert in posted] == [
        *(("shop", run_id, 0) for run_id in (check, chosen, *own)),
        *(("docs", run_id, 0) for run_id in of_docs),
    ]
    assert posted[0]["message"] == "shop_catalog_check failed.\nThe process is gone."


def test_errors_that_checks_of_successful_runs_find_are_posted_with_their_partitions(
    bench: Workbench, listener: Listener
) -> None:
    bench.settings["alert_webhook"] = listener.url
    bench.settings["max_truncated_share"] = 0.0
    bench.fill("abcd", 3)
    ticks = Ticks(bench, NAMES.check_alerts)
    ticks.look()
    assert bench.refresh().success and bench.run(NAMES.check_job).success
    for _ in range(3):
        ticks.look()
    assert listener.alerts() == [], "nothing is wrong"
    bench.file("a").write_bytes(b"x")
    bench.file("b").unlink()
    bench.write("c", 2, version="v2")
    ran = bench.run(NAMES.check_job)
    assert ran.success
    for _ in range(3):
        ticks.look()
    [alert] = listener.alerts()
    assert alert["run_id"] == ran.run_id and alert["message"].startswith(
        "catalog_check found errors.\n"
    )
    assert "every_partition_is_embedded: 3 partitions judged, 2 violations" in alert["message"]
    assert "files_are_whole: " in alert["message"]
    assert (alert["failed_count"], sorted(alert["failed_partitions"])) == (3, ["a", "b", "c"])
    assert "'a'" in alert["text"] and ran.run_id in alert["text"]


def test_ticks_that_fail_ten_times_in_a_row_are_posted_once_until_one_succeeds(
    bench: Workbench, listener: Listener
) -> None:
    """With ticks as Dagster's daemon stores them."""
    bench.settings |= {"alert_webhook": listener.url, "nightly_cron": "30 3 * * *"}
    repository = bench.definitions.get_repository_def()
    sensor = repository.get_sensor_def(NAMES.tick_alerts)
    location = InProcessCodeLocationOrigin(LoadableTargetOrigin(), location_name="shop")
    cursor: str | None = None

    def look(
        *ticks: TickStatus, failed: int = 0, name: str = NAMES.sensor, location_name: str = "shop"
    ) -> int:
        """How many alerts are posted by now; before, ticks are stored, of which so many have failed
        before."""
        nonlocal cursor
        own = InstigatorSelector(
            location_name=location_name, repository_name=repository.name, name=name
        )
        for status in ticks:
            failed = failed + 1 if status is TickStatus.FAILURE else 0
            cause = SerializableErrorInfo(
                "ConfigError: the folder 'catalog' is not there\n", [], "ConfigError"
            )
            error = (
                SerializableErrorInfo("Error occurred", [], "SensorExecutionError", cause)
                if failed
                else None
            )
            kind = InstigatorType.SCHEDULE if name == NAMES.schedule else InstigatorType.SENSOR
            options = {
                "error": error,
                "selector_id": own.get_id(),
                "consecutive_failure_count": failed,
            }
            bench.instance.create_tick(
                TickData("origin", name, kind, status, next(clock), **options)
            )
        with dg.SensorEvaluationContext(
            None,
            None,
            None,
            cursor,
            None,
            repository.name,
            repository,
            bench.instance,
            code_location_origin=location,
        ) as context:
            cursor = sensor.evaluate_tick(context).cursor
        return len(listener.posted)

    clock = itertools.count(time.time())
    fails, succeeds = TickStatus.FAILURE, TickStatus.SKIPPED
    assert look() == look(*[fails] * 9) == look(*[fails] * 12, location_name="another") == 0
    assert look(fails, failed=9) == 1 and look(TickStatus.STARTED) == look(fails, failed=10) == 1
    assert look(succeeds) == look(fails) == 1
    assert look(*[fails] * 11) == 2
    assert look(fails, name=NAMES.schedule) == 3
    alerts = listener.alerts()
    reason = "\nConfigError: the folder 'catalog' is not there"
    empty = {"catalog": "", "run_id": "", "failed_partitions": [], "failed_count": 0}
    series = (
        "10 ticks of new_partitions",
        "11 ticks of new_partitions",
        "1 tick of nightly_refresh",
    )
    for alert, what in zip(alerts, series, strict=True):
        message = f"The last {what} failed.{reason}"
        assert alert == empty | {"message": message, "text": message}
    listener.status = 500
    assert look(succeeds, fails, name=NAMES.check_schedule) == 4 and look() == 5, (
        "it is posted until it is delivered"
    )
    listener.status = 200
    assert look() == look() == 6


def test_without_a_webhook_there_is_no_sensor(bench: Workbench) -> None:
    repository = bench.definitions.get_repository_def()
    alerts = (NAMES.failure_alerts, NAMES.check_alerts, NAMES.tick_alerts)
    assert not any(map(repository.has_sensor_def, alerts))


@pytest.mark.parametrize("wrong", ["nobody", "error", "redirection", "silence"])
def test_error_of_a_failed_delivery_does_not_contain_the_url(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(alerts, "_TIMEOUT_SECONDS", 0.5)
    listener.status = {"error": 500, "redirection": 307}.get(wrong, 200)
    listener.silent = threading.Event() if wrong == "silence" else None
    problem = alerts._post(
        f"http://127.0.0.1:1/{SECRET}" if wrong == "nobody" else listener.url, {"text": "it failed"}
    )
    assert problem.startswith("the webhook ") and SECRET not in problem
    assert all(path == f"/{SECRET}" for path, _ in listener.posted), "redirections are not followed"


def test_slack_gets_the_failed_partitions_through_its_own_package(
    bench: Workbench, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    slack = pytest.importorskip("dagster_slack", reason="not installed: the extra 'slack'")
    client = pytest.importorskip(
        "slack_sdk.web.client", reason="not installed: the extra 'slack'"
    ).WebClient
    local = lambda token: client(token, base_url=f"http://127.0.0.1:{listener.port}/api/")  # noqa: E731
    monkeypatch.setattr("dagster_slack.sensors.WebClient", local)
    sensor = slack.make_slack_on_run_failure_sensor("#embeddings", SECRET, text_fn=failure_text)
    definitions = dg.Definitions.merge(bench.definitions, dg.Definitions(sensors=[sensor]))
    ticks = Ticks(bench, sensor.name, definitions)
    ticks.look()
    bench.write("bad", [("x", None)])
    ran = bench.refresh()
    ticks.look()
    [(path, body)] = listener.posted
    sent = (
        json.loads(body)
        if body.startswith(b"{")
        else {k: v[0] for k, v in parse_qs(body.decode()).items()}
    )
    assert (path, sent["channel"]) == ("/api/chat.postMessage", "#embeddings")
    assert "Failed partitions: 'bad'" in sent["text"] and ran.run_id in sent["text"]


@pytest.mark.parametrize("given", [f"ftp://h/{SECRET}", SECRET, [SECRET]])
def test_invalid_webhook_is_refused_and_not_shown(given: Any) -> None:
    with pytest.raises(Exception, match="alert_webhook") as refused:
        load_settings(alert_webhook=given)
    assert SECRET not in str(refused.getrepr(style="native"))
