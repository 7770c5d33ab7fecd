"""Alerts of failed runs, checks and ticks, which the sensor `alerts` posts to the URL of
`alert_webhook`.

An alert that the webhook does not take is posted again by the next ticks, for a day.

Slack needs no code of this project; its own package makes the sensor (pip install dagster-slack):

    make_slack_on_run_failure_sensor("#embeddings", os.environ["SLACK_TOKEN"], text_fn=failure_text)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import dagster as dg
import requests

from surge_dagster.config.settings import Settings
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.orchestration.dagster_internals import last_tick
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.runs import assets_of, concerns

_SENSOR_SECONDS = 30
# Dagster gives a tick a minute.
_TIMEOUT_SECONDS = 5.0
_POSTS_PER_TICK = 5
_RUNS_PER_TICK = 20  # that succeeded, and as many that failed
_KEPT_SECONDS = 24 * 60 * 60
_PARTITIONS_NAMED = 20
_MESSAGE_CHARACTERS = 4000
_WILL_RETRY_TAG = "dagster/will_retry"
_FAILED_TICKS = 10  # of a sensor in a row before an alert: five minutes of `new_partitions`

Alert = dict[str, Any]


def failure_text(context: dg.RunFailureSensorContext) -> str:
    """Return the text of an alert: job, errors of the run's steps, and failed partitions."""
    run = context.dagster_run
    keys = _failed_keys(_checks_that_failed(context.instance, run.run_id))
    return _text(_failure(context.instance, run), keys, run.run_id)


def webhook_alerts(names: CatalogNames, settings: Settings) -> list[dg.SensorDefinition]:
    """Return the sensor that posts an alert for failed runs, failed checks, and failed ticks.

    The posted JSON object holds `catalog` (the catalog's name or ""), `source`, `run_id`,
    `run_path` (of the run's page; both are "" for ticks), `message`, `failed_partitions` (the first
    20 keys), `failed_count`, and `text`, which combines them. Runs that Dagster launches again are
    left out, and so are checks of severity warn, except `encode_not_slow`. Without the setting
    `alert_webhook` there is none.
    """
    if settings.alert_webhook is None:
        return []
    url = settings.alert_webhook.get_secret_value()
    common = {"catalog": names.name or "", "source": settings.source}
    assets = names.assets(each.label for each in settings.derived)

    @dg.sensor(
        name=names.alerts,
        description=(
            "Posts an alert for each run of this catalog that failed and will not be launched "
            "again, found an error with a check, or was slow; and when "
            f"{_FAILED_TICKS} ticks of a sensor in a row, or one of a schedule, have failed."
        ),
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        return _look(context, names, assets, url, common)

    return [sensor]


def _look(
    context: dg.SensorEvaluationContext,
    names: CatalogNames,
    assets: Set[dg.AssetKey],
    url: str,
    common: Alert,
) -> dg.SkipReason:
    """Post what is new, up to the first alert that is not delivered: the next tick begins with it.

    Args:
        common: what all alerts of the catalog have.
    """
    cursor = {"seen": {}, "failing": []} | json.loads(context.cursor or "{}")
    posted = 0
    for alert in _new(context, names, assets, cursor):
        if posted == _POSTS_PER_TICK:
            break
        problem = _post(url, common | alert)
        if problem:
            context.log.error(f"An alert is not delivered yet: {problem}")
            break
        posted += 1
    context.update_cursor(json.dumps(cursor))
    return dg.SkipReason(f"{counted(posted, 'alert')} posted")


def _new(
    context: dg.SensorEvaluationContext,
    names: CatalogNames,
    assets: Set[dg.AssetKey],
    cursor: dict[str, Any],
) -> Iterator[Alert]:
    """Yield alerts of what has failed since the last tick; the cursor passes one when the next one
    is asked for.

    Args:
        cursor: `seen` is the newest end of a run that was looked at, by kind; `failing` are sensors
            and schedules whose ticks fail.
    """
    seen = cursor["seen"]
    for kind in (dg.DagsterEventType.RUN_FAILURE, dg.DagsterEventType.RUN_SUCCESS):
        if kind.value not in seen:  # what ended before the first tick is no news
            newest = context.instance.fetch_run_status_changes(kind, limit=1).records
            seen[kind.value] = newest[0].storage_id if newest else 0
        since = dg.RunStatusChangeRecordsFilter(
            kind, after_storage_id=seen[kind.value], after_timestamp=time.time() - _KEPT_SECONDS
        )
        page = context.instance.fetch_run_status_changes(since, _RUNS_PER_TICK, ascending=True)
        for record in page.records:
            yield from _of_run(names, assets, context.instance, record.run_id, kind)
            seen[kind.value] = record.storage_id

    failing = _failing(context, names)
    cursor["failing"] = [name for name in cursor["failing"] if name in failing]
    for name, message in failing.items():
        if name not in cursor["failing"]:
            yield _alert(message)
            cursor["failing"].append(name)


def _of_run(
    names: CatalogNames,
    assets: Set[dg.AssetKey],
    instance: dg.DagsterInstance,
    run_id: str,
    kind: dg.DagsterEventType,
) -> Iterator[Alert]:
    """Yield the alert of a run that has ended, if it is this catalog's and has to be known."""
    run = instance.get_run_by_id(run_id)
    if run is None:
        return
    checks = _checks_that_failed(instance, run_id)
    # A run may also evaluate checks without their assets.
    is_of_check = any(each.asset_key in assets for each in checks)
    if not is_of_check and not concerns(instance, run, names.jobs, assets):
        return
    if kind is dg.DagsterEventType.RUN_SUCCESS:
        wrong: list[dg.AssetCheckEvaluation] = []
        for each in checks:
            if each.severity is dg.AssetCheckSeverity.ERROR or each.check_name == "encode_not_slow":
                wrong.append(each)
        if wrong:
            yield _alert(_findings(instance, run, wrong), wrong, run_id)
    elif run.tags.get(_WILL_RETRY_TAG) != "true":
        yield _alert(_failure(instance, run), checks, run_id)


def _failing(context: dg.SensorEvaluationContext, names: CatalogNames) -> dict[str, str]:
    """Return a message for each sensor and schedule whose ticks fail."""
    watched = dict.fromkeys((names.sensor, names.hand_over_sensor, names.lost_runs), _FAILED_TICKS)
    watched |= {names.schedule: 1, names.check_schedule: 1}
    failing: dict[str, str] = {}
    for name, fewest in watched.items():
        tick = last_tick(context, name)
        if tick is None or tick.error is None or tick.consecutive_failure_count < fewest:
            continue
        # Dagster's own error names only the sensor
        error = (tick.error.cause or tick.error).message.strip()
        count = counted(tick.consecutive_failure_count, "tick")
        failing[name] = f"The last {count} of {name} failed.\n{error}"
    return failing


def _alert(message: str, checks: Iterable[dg.AssetCheckEvaluation] = (), run_id: str = "") -> Alert:
    message = message[:_MESSAGE_CHARACTERS]
    keys = _failed_keys(checks)
    return {
        "run_id": run_id,
        "run_path": f"/runs/{run_id}" if run_id else "",
        "message": message,
        "failed_partitions": keys[:_PARTITIONS_NAMED],
        "failed_count": len(keys),
        "text": _text(message, keys, run_id),
    }


def _post(url: str, alert: Alert) -> str:
    """Post once, without following redirections; return what went wrong, without the URL, which is
    a secret."""
    try:
        answer = requests.post(url, json=alert, timeout=_TIMEOUT_SECONDS, allow_redirects=False)
    except (OSError, ValueError) as error:
        return f"the webhook cannot be reached ({type(error).__name__})"
    if answer.ok and not answer.is_redirect:
        return ""
    return f"the webhook answered {answer.status_code}"


def _text(message: str, keys: list[str], run_id: str) -> str:
    lines = [message]
    if keys:
        lines.append(f"Failed partitions: {named(map(repr, keys), _PARTITIONS_NAMED)}")
    if run_id:
        lines.append(f"Run {run_id}")
    return "\n".join(lines)


def _name(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """Return the name of a run's job, or of the assets that a run from the UI materializes."""
    if not run.job_name.startswith("__"):
        return run.job_name
    assets = [key.to_user_string() for key in assets_of(instance, run) or ()]
    return f"The materialization of {', '.join(sorted(assets))}"


def _failure(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """Return what failed in a run: the errors of its steps, or how its process ended."""
    lines = [f"{_name(instance, run)} failed."]
    for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        assert entry.dagster_event is not None
        data = entry.dagster_event.step_failure_data
        if data.user_failure_data and data.user_failure_data.description:
            lines.append(data.user_failure_data.description)
        elif data.error:
            lines.append(data.error.message.strip())
    if len(lines) == 1:
        ends = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
        lines += [entry.message for entry in ends]
    return "\n".join(lines)


def _findings(
    instance: dg.DagsterInstance, run: dg.DagsterRun, checks: Sequence[dg.AssetCheckEvaluation]
) -> str:
    lines = [f"{_name(instance, run)}: {counted(len(checks), 'check')} failed."]
    for each in checks:
        lines.append(f"{each.asset_key.to_user_string()}: {each.check_name}: {each.description}")
    return "\n".join(lines)


def _checks_that_failed(instance: dg.DagsterInstance, run_id: str) -> list[dg.AssetCheckEvaluation]:
    """Return the checks of a run whose last result is that they failed."""
    logs = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    last: dict[dg.AssetCheckKey, dg.AssetCheckEvaluation] = {}
    for entry in logs:
        if entry.dagster_event is not None:
            check = entry.dagster_event.asset_check_evaluation_data
            last[check.asset_check_key] = check
    return [check for check in last.values() if not check.passed]


def _failed_keys(checks: Iterable[dg.AssetCheckEvaluation]) -> list[str]:
    """Return catalog keys of the partitions that these checks list as failed."""
    keys: dict[str, None] = {}
    for check in checks:
        failed: Any = check.metadata.get("partitions_failed")
        if failed is not None:
            for partition in failed.value:
                keys[str(partition["key"])] = None
    return list(keys)
