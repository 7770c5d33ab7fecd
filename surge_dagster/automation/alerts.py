"""Alerts of failed runs, checks and ticks, which sensors post to the URL of `alert_webhook`.

Slack needs no code of this project; its own package makes the sensor (pip install dagster-slack):

    make_slack_on_run_failure_sensor("#embeddings", os.environ["SLACK_TOKEN"], text_fn=failure_text)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import dagster as dg
import requests

from surge_dagster.config.settings import Settings
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.orchestration.active_runs import embeds
from surge_dagster.orchestration.dagster_internals import last_tick
from surge_dagster.orchestration.names import LOST_RUNS, CatalogNames

_SENSOR_SECONDS = 30
_TIMEOUT_SECONDS = 5.0  # a tick takes up to five failed runs, and Dagster gives it a minute
_PARTITIONS_NAMED = 20
_MESSAGE_CHARACTERS = 4000
_WILL_RETRY_TAG = "dagster/will_retry"
_FAILED_TICKS = 10  # of a sensor in a row before an alert: five minutes of `new_partitions`


def failure_text(context: dg.RunFailureSensorContext) -> str:
    """Return the text of an alert: job, errors of the run's steps, and failed partitions."""
    return _text(
        _message(context), _failed_keys(_checks_that_failed(context)), context.dagster_run.run_id
    )


def webhook_alerts(names: CatalogNames, settings: Settings) -> list[dg.SensorDefinition]:
    """Return the sensors that post an alert for failed runs, failed checks, and failed ticks.

    The posted JSON object holds `catalog` (the catalog's name or ""), `run_id` (of ticks ""),
    `message`, `failed_partitions` (the first 20 keys), `failed_count`, and `text`, which combines
    them. Runs that Dagster launches again are left out, and so are checks of severity warn, except
    `encode_not_slow`. Without the setting `alert_webhook` there are none.
    """
    if settings.alert_webhook is None:
        return []
    webhook = _Webhook(settings.alert_webhook.get_secret_value(), names)
    return [
        _failed_runs(names, webhook),
        _failed_checks(names, webhook),
        _failed_ticks(names, webhook),
    ]


class _Webhook:
    """Posts alerts of a catalog; no message contains its URL, which is a secret."""

    def __init__(self, url: str, names: CatalogNames) -> None:
        self._url = url
        self._names = names

    def post(self, log: logging.Logger, message: str, keys: list[str], run_id: str) -> bool:
        """Post an alert; return whether it was delivered."""
        message = message[:_MESSAGE_CHARACTERS]
        alert = {
            "catalog": self._names.name or "",
            "run_id": run_id,
            "message": message,
            "failed_partitions": keys[:_PARTITIONS_NAMED],
            "failed_count": len(keys),
            "text": _text(message, keys, run_id),
        }
        problem = _post(self._url, alert)
        if problem:
            what = f"run {run_id}" if run_id else "failed ticks"
            log.error(f"the alert of {what} was not delivered: {problem}")
        return not problem


def _post(url: str, alert: dict[str, Any]) -> str:
    """Post once, without following redirections; return what went wrong."""
    try:
        answer = requests.post(url, json=alert, timeout=_TIMEOUT_SECONDS, allow_redirects=False)
    except (requests.RequestException, OSError, ValueError) as error:
        return f"the webhook cannot be reached ({type(error).__name__})"
    if answer.ok and not answer.is_redirect:
        return ""
    return f"the webhook answered {answer.status_code}"


def _failed_runs(names: CatalogNames, webhook: _Webhook) -> dg.SensorDefinition:
    @dg.run_failure_sensor(
        name=names.failure_alerts,
        description=(
            "Posts an alert for each run of this catalog that failed and will not be launched "
            "again."
        ),
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    def failed_runs(context: dg.RunFailureSensorContext) -> None:
        run = context.dagster_run
        if _is_ours(names, context) and run.tags.get(_WILL_RETRY_TAG) != "true":
            keys = _failed_keys(_checks_that_failed(context))
            webhook.post(context.log, _message(context), keys, run.run_id)

    return failed_runs


def _failed_checks(names: CatalogNames, webhook: _Webhook) -> dg.SensorDefinition:
    @dg.run_status_sensor(
        run_status=dg.DagsterRunStatus.SUCCESS,
        name=names.check_alerts,
        description=(
            "Posts an alert for each run of this catalog that succeeded and found an error with a "
            "check, or was slow."
        ),
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    def failed_checks(context: dg.RunStatusSensorContext) -> None:
        if not _is_ours(names, context):
            return
        wrong = list(filter(_is_alerted, _checks_that_failed(context)))
        if not wrong:
            return
        has_errors = any(each.severity == dg.AssetCheckSeverity.ERROR for each in wrong)
        what = "found errors" if has_errors else "was slow"
        lines = [f"{context.dagster_run.job_name} {what}."]
        lines += [f"{each.check_name}: {each.description}" for each in wrong]
        run_id = context.dagster_run.run_id
        webhook.post(context.log, "\n".join(lines), _failed_keys(wrong), run_id)

    return failed_checks


def _failed_ticks(names: CatalogNames, webhook: _Webhook) -> dg.SensorDefinition:
    # All catalogs share `lost_runs`, and each posts that it fails: each may have its own URL.
    sensors = (names.sensor, names.hand_over_sensor, LOST_RUNS, names.failure_alerts)
    watched = dict.fromkeys((*sensors, names.check_alerts), _FAILED_TICKS)
    watched |= {names.schedule: 1, names.check_schedule: 1}

    @dg.sensor(
        name=names.tick_alerts,
        description=(
            f"Posts an alert when {_FAILED_TICKS} ticks of a sensor in a row, or one of a "
            "schedule, have failed; the next one when a tick has succeeded in between."
        ),
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    def failed_ticks(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        posted = json.loads(context.cursor or "[]")
        failing: list[str] = []
        for name, fewest in watched.items():
            tick = last_tick(context, name)
            if tick is None or tick.error is None or tick.consecutive_failure_count < fewest:
                continue
            # Dagster's own error names only the sensor
            error = (tick.error.cause or tick.error).message.strip()
            count = counted(tick.consecutive_failure_count, "tick")
            message = f"The last {count} of {name} failed.\n{error}"
            # one that is not delivered is posted by the next tick
            if name in posted or webhook.post(context.log, message, [], ""):
                failing.append(name)
        context.update_cursor(json.dumps(failing))
        return dg.SkipReason(f"ticks fail of: {', '.join(failing) or 'nothing'}")

    return failed_ticks


def _is_ours(names: CatalogNames, context: dg.RunStatusSensorContext) -> bool:
    # The sensors monitor all runs: a run that is launched in the UI for an asset, or by a user's
    # own job, belongs to no job of this catalog.
    run = context.dagster_run
    return run.job_name in names.jobs or embeds(names, context.instance, run)


def _text(message: str, keys: list[str], run_id: str) -> str:
    lines = [message]
    if keys:
        lines.append(f"Failed partitions: {named(map(repr, keys), _PARTITIONS_NAMED)}")
    if run_id:
        lines.append(f"Run {run_id}")
    return "\n".join(lines)


def _message(context: dg.RunFailureSensorContext) -> str:
    lines = [f"{context.dagster_run.job_name} failed."]
    for event in context.get_step_failure_events():
        data = event.step_failure_data
        if data.user_failure_data and data.user_failure_data.description:
            lines.append(data.user_failure_data.description)
        elif data.error:
            lines.append(data.error.message.strip())
    if len(lines) == 1:
        lines.append(context.failure_event.message or "")
    return "\n".join(lines)[:_MESSAGE_CHARACTERS]


def _checks_that_failed(context: dg.RunStatusSensorContext) -> list[dg.AssetCheckEvaluation]:
    """Return the checks of a run whose last result is that they failed."""
    logs = context.instance.all_logs(
        context.dagster_run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION
    )
    last: dict[str, dg.AssetCheckEvaluation] = {}
    for entry in logs:
        if entry.dagster_event is not None:
            check = entry.dagster_event.asset_check_evaluation_data
            last[check.check_name] = check
    return [check for check in last.values() if not check.passed]


def _is_alerted(check: dg.AssetCheckEvaluation) -> bool:
    return check.severity == dg.AssetCheckSeverity.ERROR or check.check_name == "encode_not_slow"


def _failed_keys(checks: Iterable[dg.AssetCheckEvaluation]) -> list[str]:
    """Return catalog keys of the partitions that these checks list as failed."""
    keys: dict[str, None] = {}
    for check in checks:
        failed: Any = check.metadata.get("partitions_failed")
        if failed is not None:
            for partition in failed.value:
                keys[str(partition["key"])] = None
    return list(keys)
