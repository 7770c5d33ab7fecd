"""Tests of alerts: what is posted for which runs, and that nothing shows the URL."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote_plus

import dagster as dg
import pytest

from surge_dagster.assets.consumers import CHECK
from surge_dagster.automation import alerts
from surge_dagster.automation.alerts import failure_text
from surge_dagster.config.settings import load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.orchestration.launch import job_of
from surge_dagster.orchestration.names import CatalogNames
from tests.dagster import private_dagster
from tests.dagster.conftest import NAMES, Workbench, evaluate, execute, numbered_keys
from tests.http_server import Answer, Request, json_server

SECRET = "hunter2"
SHOP = CatalogNames("shop")
DOCS = CatalogNames("docs")
FOR_GOOD = {"dagster/max_retries": "0"}  # Dagster launches it no more


@dataclass
class Listener:
    """An HTTP server that keeps what is posted to it; `status` and `answer` are what it says."""

    posted: list[tuple[str, bytes]] = field(default_factory=list)
    status: int = 200
    answer: dict[str, Any] = field(default_factory=lambda: {"ok": True})
    silent: threading.Event | None = None  # set when it may answer
    server: str = ""

    @property
    def url(self) -> str:
        return f"{self.server}/{SECRET}"

    def alerts(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.posted]


@pytest.fixture
def listener() -> Iterator[Listener]:
    kept = Listener()

    def answer(request: Request) -> Answer:
        kept.posted.append((request.path, request.body))
        if kept.silent is not None:
            kept.silent.wait(60)
        return Answer(kept.answer, kept.status, {"Location": f"{kept.server}/elsewhere"})

    with json_server(answer) as kept.server:
        yield kept
        if kept.silent is not None:
            kept.silent.set()


class Ticks:
    """A sensor with the cursor that Dagster keeps for it, in the code location `shop`."""

    def __init__(
        self, bench: Workbench, name: str, definitions: dg.Definitions | None = None
    ) -> None:
        self._instance = bench.instance
        self._repository = (definitions or bench.definitions).get_repository_def()
        self._name = name
        self._cursor: str | None = None
        self.look()  # what failed before the first tick is not posted

    def look(self) -> None:
        with dg.SensorEvaluationContext(
            *(None, None, None, self._cursor, None),
            repository_name=self._repository.name,
            repository_def=self._repository,
            instance=self._instance,
            code_location_origin=private_dagster.origin_of_location("shop"),
        ) as context:
            sensor = self._repository.get_sensor_def(self._name)
            self._cursor = sensor.evaluate_tick(context).cursor

    def store(self, status: str, failures: int, location: str = "shop") -> None:
        """Store a tick of the sensor `new_partitions`."""
        private_dagster.store_tick(
            self._instance,
            NAMES.sensor,
            status,
            location=location,
            repository=self._repository.name,
            failures=failures,
            error="ConfigError: the folder 'catalog' is not there",
        )

    def fail(self, first: int, last: int, location: str = "shop") -> None:
        for failures in range(first, last + 1):
            self.store("FAILURE", failures, location)


@pytest.fixture
def ticks(bench: Workbench, listener: Listener) -> Ticks:
    """The sensor of alerts of a catalog that posts to the listener."""
    bench.settings["alert_webhook"] = listener.url
    return Ticks(bench, NAMES.alerts)


def test_failed_run_is_posted_once_with_its_partitions(
    bench: Workbench, listener: Listener, ticks: Ticks
) -> None:
    bench.write("good")
    bad = numbered_keys(25)
    for key in bad:
        bench.write(key, [("x", None)])

    ran = bench.refresh()
    ticks.look()
    ticks.look()

    [alert] = listener.alerts()

    assert alert["catalog"] == ""
    assert alert["source"] == "catalog"
    assert alert["run_id"] == ran.run_id
    assert alert["run_path"] == f"/runs/{ran.run_id}"
    assert alert["failed_count"] == 25
    assert alert["failed_partitions"] == bad[:20]
    assert alert["message"].startswith("catalog_refresh failed.\n25 partitions failed")
    assert "lists all of them" in alert["text"]
    assert ran.run_id in alert["text"]


@pytest.fixture
def two_catalogs(listener: Listener) -> dg.Definitions:
    """Two catalogs with one listener; the jobs `ours` and `theirs` embed the first and second."""
    jobs = [
        dg.define_asset_job("ours", selection=[SHOP.embeddings]),
        dg.define_asset_job("theirs", selection=[DOCS.embeddings]),
    ]
    return dg.Definitions.merge(
        embedding_catalog(name="shop", source="c", output="o", alert_webhook=listener.url),
        embedding_catalog(name="docs", source="c", output="o", alert_webhook=listener.url),
        dg.Definitions(jobs=jobs),
    )


def fail(bench: Workbench, definitions: dg.Definitions, job: str, **how: Any) -> str:
    """Report a run of a job as failed; returns its id."""
    job_def = definitions.get_repository_def().get_job(job)
    run = bench.instance.create_run_for_job(job_def, **how)
    bench.instance.report_run_failed(run, "The process is gone.")
    return run.run_id


def test_failed_run_of_any_job_is_posted_once_for_its_own_catalog(
    bench: Workbench, listener: Listener, two_catalogs: dg.Definitions
) -> None:
    ticks = [Ticks(bench, names.alerts, two_catalogs) for names in (SHOP, DOCS)]

    check = fail(bench, two_catalogs, SHOP.check_job, tags=FOR_GOOD)
    ours = fail(bench, two_catalogs, "ours", tags=FOR_GOOD)
    theirs = fail(bench, two_catalogs, "theirs", tags=FOR_GOOD)
    for each in ticks * 4:
        each.look()

    posted = [(alert["run_id"], alert["catalog"]) for alert in listener.alerts()]

    assert sorted(posted) == sorted([(check, "shop"), (ours, "shop"), (theirs, "docs")])


def test_failed_run_that_dagster_launches_again_is_not_posted(
    bench: Workbench, listener: Listener, two_catalogs: dg.Definitions
) -> None:
    ticks = Ticks(bench, SHOP.alerts, two_catalogs)

    fail(bench, two_catalogs, SHOP.refresh_job)
    ticks.look()

    assert listener.alerts() == []


def test_failed_check_of_one_table_is_posted_if_that_of_another_passes(
    bench: Workbench, listener: Listener, ticks: Ticks
) -> None:
    @dg.op
    def compare(context) -> None:
        context.log_event(dg.AssetCheckEvaluation(NAMES.lancedb, CHECK, False, {}))
        context.log_event(dg.AssetCheckEvaluation(NAMES.pgvector, CHECK, True, {}))

    assert execute(bench.instance, job_of("my_checks", compare, "")).success
    ticks.look()

    [alert] = listener.alerts()
    assert alert["message"].startswith("my_checks: 1 check failed.\nlancedb: table_matches_files")


def test_run_of_the_ui_for_a_table_is_posted_with_the_asset(
    bench: Workbench, listener: Listener, ticks: Ticks
) -> None:
    bench.settings["pgvector"] = {"dsn": "postgresql://127.0.0.1/shop", "table": "products"}
    job = bench.definitions.resolve_implicit_global_asset_job_def()
    run = bench.instance.create_run_for_job(job, asset_selection={NAMES.pgvector}, tags=FOR_GOOD)
    bench.instance.report_run_failed(run, "The process is gone.")
    ticks.look()

    [alert] = listener.alerts()
    assert alert["run_id"] == run.run_id
    assert alert["message"].startswith("The materialization of pgvector failed.\n")


def test_alert_that_was_not_delivered_is_posted_again_for_a_day(
    bench: Workbench,
    listener: Listener,
    two_catalogs: dg.Definitions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener.status = 503
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    ticks = Ticks(bench, SHOP.alerts, two_catalogs)
    fail(bench, two_catalogs, "ours", tags=FOR_GOOD)

    for _ in range(3):
        ticks.look()

    assert len(listener.posted) == 3

    now += 24 * 60 * 60
    ticks.look()

    assert len(listener.posted) == 3, "it is a day old"


def test_alert_that_was_delivered_at_last_is_not_posted_again(
    bench: Workbench, listener: Listener, two_catalogs: dg.Definitions
) -> None:
    listener.status = 503
    ticks = Ticks(bench, SHOP.alerts, two_catalogs)
    fail(bench, two_catalogs, "ours", tags=FOR_GOOD)
    ticks.look()

    listener.status = 200
    for _ in range(2):
        ticks.look()

    assert len(listener.posted) == 2


def test_ticks_that_fail_ten_times_in_a_row_are_posted_once(
    ticks: Ticks, listener: Listener
) -> None:
    ticks.fail(1, 9)
    ticks.look()

    assert listener.posted == []

    ticks.fail(10, 10)
    ticks.look()
    ticks.fail(11, 12)
    ticks.look()

    [alert] = listener.alerts()
    assert alert["message"].startswith("The last 10 ticks of new_partitions failed.\nConfigError: ")


def test_ticks_that_fail_again_after_a_success_are_posted_again(
    ticks: Ticks, listener: Listener
) -> None:
    ticks.fail(1, 10)
    ticks.look()
    ticks.store("SKIPPED", 0)
    ticks.look()
    ticks.fail(1, 10)
    ticks.look()

    assert len(listener.posted) == 2


def test_failing_ticks_of_another_code_location_are_not_posted(
    ticks: Ticks, listener: Listener
) -> None:
    ticks.fail(1, 12, location="another")
    ticks.look()

    assert listener.posted == []


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

    assert problem.startswith("the webhook ")
    assert SECRET not in problem
    for path, _ in listener.posted:
        assert path == f"/{SECRET}", "redirections are not followed"


def test_slack_gets_the_failed_partitions_through_its_own_package(
    bench: Workbench, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    slack = pytest.importorskip("dagster_slack", reason="not installed: the extra 'slack'")
    client = slack.sensors.WebClient
    url = f"{listener.server}/api/"
    monkeypatch.setattr(slack.sensors, "WebClient", partial(client, base_url=url))
    sensor = slack.make_slack_on_run_failure_sensor("#embeddings", SECRET, text_fn=failure_text)
    definitions = dg.Definitions.merge(bench.definitions, dg.Definitions(sensors=[sensor]))
    repository = definitions.get_repository_def()
    first = evaluate(bench.instance, repository, None, sensor.name)
    bench.write("bad", [("x", None)])
    ran = bench.refresh()
    evaluate(bench.instance, repository, None, sensor.name, first.cursor)

    [(path, body)] = listener.posted

    sent = unquote_plus(body.decode())

    assert path == "/api/chat.postMessage"
    assert "#embeddings" in sent
    assert "Failed partitions: 'bad'" in sent
    assert ran.run_id in sent


@pytest.mark.parametrize("given", [f"ftp://h/{SECRET}", SECRET, [SECRET]])
def test_invalid_webhook_is_refused_and_not_shown(given: Any) -> None:
    with pytest.raises(Exception, match="alert_webhook") as refused:
        load_settings(alert_webhook=given)
    assert SECRET not in str(refused.getrepr(style="native"))
