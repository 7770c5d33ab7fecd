"""Alerts of failed runs, checks and ticks: sensors that post them to the URL of `alert_webhook`; a
text for Slack.

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
    """The text of an alert: the run's job, the errors of its steps, and the failed partitions."""
    return _text(
        _message(context), _failed_keys(_failed_checks(context)), context.dagster_run.run_id
    )


def webhook_alerts(names: CatalogNames, settings: Settings) -> list[dg.SensorDefinition]:
    """The sensors that post an alert for each failed run of a catalog, each failed check, and
    lasting failed ticks.

    The posted JSON object holds `catalog` (the catalog's name or ""), `run_id` (of ticks ""),
    `message`, `failed_partitions` (the first 20 keys), `failed_count`, and `text`, which combines
    them. Runs that Dagster launches again are left out, and so are checks of severity warn, except
    `encode_not_slow`. Without the setting `alert_webhook` there are none.
    """
    if settings.alert_webhook is None:
        return []
    url = settings.alert_webhook.get_secret_value()
    options = {
        "minimum_interval_seconds": _SENSOR_SECONDS,
        "default_status": dg.DefaultSensorStatus.RUNNING,
    }

    def post(log: logging.Logger, message: str, keys: list[str], run_id: str) -> bool:
        alert = {
            "catalog": names.name or "",
            "run_id": run_id,
            "message": message,
            "failed_partitions": keys[:_PARTITIONS_NAMED],
            "failed_count": len(keys),
            "text": _text(message, keys, run_id),
        }
        if problem := _post(url, alert):
            log.error(
                f"the alert of {f'run {run_id}' if run_id else 'failed ticks'} was not delivered: "
                f"{problem}"
            )
        return not problem

    # The sensors monitor all runs: a run that is launched in the UI for an asset, or by a user's
    # own job, belongs to no job of this catalog.
    def is_ours(context: dg.RunStatusSensorContext) -> bool:
        run = context.dagster_run
        return run.job_name in names.jobs or embeds(names, context.instance, run)

    @dg.run_failure_sensor(
        name=names.failure_alerts,
        description=(
            "Posts an alert for each run of this catalog that failed and will not be launched "
            "again."
        ),
        **options,
    )
    def failed_runs(context: dg.RunFailureSensorContext) -> None:
        if is_ours(context) and context.dagster_run.tags.get(_WILL_RETRY_TAG) != "true":
            keys = _failed_keys(_failed_checks(context))
            post(context.log, _message(context), keys, context.dagster_run.run_id)

    @dg.run_status_sensor(
        run_status=dg.DagsterRunStatus.SUCCESS,
        name=names.check_alerts,
        description=(
            "Posts an alert for each run of this catalog that succeeded and found an error with a "
            "check, or was slow."
        ),
        **options,
    )
    def failed_checks(context: dg.RunStatusSensorContext) -> None:
        if not is_ours(context):
            return
        wrong = [each for each in _failed_checks(context) if _is_alerted(each)]
        if wrong:
            found = (f"{each.check_name}: {each.description}" for each in wrong)
            has_errors = any(each.severity == dg.AssetCheckSeverity.ERROR for each in wrong)
            what = "found errors" if has_errors else "was slow"
            message = "\n".join((f"{context.dagster_run.job_name} {what}.", *found))
            post(
                context.log,
                message[:_MESSAGE_CHARACTERS],
                _failed_keys(wrong),
                context.dagster_run.run_id,
            )

    # `lost_runs` is that of all catalogs, and each posts that it fails: each may have a URL of its
    # own.
    sensors = (
        names.sensor,
        names.hand_over_sensor,
        LOST_RUNS,
        names.failure_alerts,
        names.check_alerts,
    )
    watched = dict.fromkeys(sensors, _FAILED_TICKS) | dict.fromkeys(
        (names.schedule, names.check_schedule), 1
    )

    @dg.sensor(
        name=names.tick_alerts,
        description=(
            f"Posts an alert when {_FAILED_TICKS} ticks of a sensor in a row, or one of a "
            "schedule, have failed; the next one when a tick has succeeded in between."
        ),
        **options,
    )
    def failed_ticks(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        posted, failing = json.loads(context.cursor or "[]"), list[str]()
        for name, fewest in watched.items():
            tick = last_tick(context, name)
            if tick is None or tick.error is None or tick.consecutive_failure_count < fewest:
                continue
            # Dagster's own error names the sensor alone
            error = (tick.error.cause or tick.error).message.strip()
            count = counted(tick.consecutive_failure_count, "tick")
            message = f"The last {count} of {name} failed.\n{error}"[:_MESSAGE_CHARACTERS]
            if name in posted or post(context.log, message, [], ""):  # else the next tick posts it
                failing.append(name)
        context.update_cursor(json.dumps(failing))
        return dg.SkipReason(f"ticks fail of: {', '.join(failing) or 'nothing'}")

    return [failed_runs, failed_checks, failed_ticks]


def _text(message: str, keys: list[str], run_id: str) -> str:
    lines = [f"Failed partitions: {named(map(repr, keys), _PARTITIONS_NAMED)}"] if keys else []
    lines += [f"Run {run_id}"] if run_id else []
    return "\n".join((message, *lines))


def _post(url: str, alert: dict[str, Any]) -> str:
    """Post once, without following redirections; returns what went wrong, never with the URL, which
    is a secret."""
    try:
        answer = requests.post(url, json=alert, timeout=_TIMEOUT_SECONDS, allow_redirects=False)
    except (requests.RequestException, OSError, ValueError) as error:
        return f"the webhook cannot be reached ({type(error).__name__})"
    return (
        "" if answer.ok and not answer.is_redirect else f"the webhook answered {answer.status_code}"
    )


def _message(context: dg.RunFailureSensorContext) -> str:
    reasons = []
    for event in context.get_step_failure_events():
        data = event.step_failure_data
        ours = data.user_failure_data.description if data.user_failure_data else None
        reasons.append(ours or (data.error.message.strip() if data.error else ""))
    reasons = list(filter(None, reasons)) or [context.failure_event.message or ""]
    return "\n".join((f"{context.dagster_run.job_name} failed.", *reasons))[:_MESSAGE_CHARACTERS]


def _failed_checks(context: dg.RunStatusSensorContext) -> list[dg.AssetCheckEvaluation]:
    """The checks of a run whose last result is that they failed."""
    logs = context.instance.all_logs(
        context.dagster_run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION
    )
    events = (entry.dagster_event for entry in logs)
    checks = (event.asset_check_evaluation_data for event in events if event is not None)
    last = {check.check_name: check for check in checks}
    return [check for check in last.values() if not check.passed]


def _is_alerted(check: dg.AssetCheckEvaluation) -> bool:
    return check.severity == dg.AssetCheckSeverity.ERROR or check.check_name == "encode_not_slow"


def _failed_keys(checks: Iterable[dg.AssetCheckEvaluation]) -> list[str]:
    """Catalog keys of the partitions that these checks list as failed."""
    keys: dict[str, None] = {}
    for check in checks:
        failed: Any = check.metadata.get("partitions_failed")
        keys |= (
            dict.fromkeys(str(partition["key"]) for partition in failed.value)
            if failed is not None
            else {}
        )
    return list(keys)
