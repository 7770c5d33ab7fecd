"""Alerts of failed runs: a sensor that posts them to the URL of the setting `alert_webhook`, and their text for Slack.

Slack needs no code of this project; its own package makes the sensor (pip install dagster-slack):

    make_slack_on_run_failure_sensor("#embeddings", os.environ["SLACK_TOKEN"], text_fn=failure_text)
"""

from __future__ import annotations

from typing import Any

import dagster as dg
import requests

from surge_dagster.config.check_policy import RUN_CHECK
from surge_dagster.config.settings import Settings
from surge_dagster.orchestration.active_runs import embeds
from surge_dagster.orchestration.launch import named
from surge_dagster.orchestration.names import CatalogNames

_SENSOR_SECONDS = 30
_TIMEOUT_SECONDS = 5.0  # a tick takes up to five failed runs, and Dagster gives it a minute
_PARTITIONS_NAMED = 20
_MESSAGE_CHARACTERS = 4000
_WILL_RETRY_TAG = "dagster/will_retry"


def failure_text(context: dg.RunFailureSensorContext) -> str:
    """The text of an alert: the run's job, the errors of its steps, and the failed partitions."""
    keys = _failed_partitions(context.instance, context.dagster_run.run_id)
    lines = [_message(context)]
    if keys:
        lines.append(f"Failed partitions: {named(map(repr, keys), _PARTITIONS_NAMED)}")
    return "\n".join((*lines, f"Run {context.dagster_run.run_id}"))


def webhook_alerts(names: CatalogNames, settings: Settings) -> list[dg.SensorDefinition]:
    """The sensor that posts an alert for each failed run of a catalog; none without the setting `alert_webhook`.

    The posted JSON object holds `catalog` (the catalog's name or ""), `run_id`, `message`, `failed_partitions` (the
    first 20 keys), `failed_count`, and `text`, which combines them. Runs that Dagster launches again are left out.
    """
    if settings.alert_webhook is None:
        return []
    url = settings.alert_webhook.get_secret_value()

    # The sensor monitors all runs: a run that is launched in the UI for an asset, or by a user's own job, belongs to no
    # job of this catalog.
    @dg.run_failure_sensor(
        name=names.failure_alerts,
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Posts an alert for each run of this catalog that failed and will not be launched again.",
    )
    def sensor(context: dg.RunFailureSensorContext) -> None:
        run = context.dagster_run
        ours = run.job_name in names.jobs or embeds(names, context.instance, run)
        if not ours or run.tags.get(_WILL_RETRY_TAG) == "true":
            return
        keys = _failed_partitions(context.instance, run.run_id)
        alert = {
            "catalog": names.name or "",
            "run_id": run.run_id,
            "message": _message(context),
            "failed_partitions": keys[:_PARTITIONS_NAMED],
            "failed_count": len(keys),
            "text": failure_text(context),
        }
        if problem := _post(url, alert):
            context.log.error(f"the alert of run {run.run_id} was not delivered: {problem}")

    return [sensor]


def _post(url: str, alert: dict[str, Any]) -> str:
    """Post once, without following redirections; returns what went wrong, never with the URL, which is a secret."""
    try:
        answer = requests.post(url, json=alert, timeout=_TIMEOUT_SECONDS, allow_redirects=False)
    except (requests.RequestException, OSError, ValueError) as error:
        return f"the webhook cannot be reached ({type(error).__name__})"
    return "" if answer.ok and not answer.is_redirect else f"the webhook answered {answer.status_code}"


def _message(context: dg.RunFailureSensorContext) -> str:
    reasons = []
    for event in context.get_step_failure_events():
        data = event.step_failure_data
        ours = data.user_failure_data.description if data.user_failure_data else None
        reasons.append(ours or (data.error.message.strip() if data.error else ""))
    reasons = list(filter(None, reasons)) or [context.failure_event.message or ""]
    return "\n".join((f"{context.dagster_run.job_name} failed.", *reasons))[:_MESSAGE_CHARACTERS]


def _failed_partitions(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    """Catalog keys of the partitions that the run's check lists as failed; none if the run died before its check."""
    for entry in reversed(instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)):
        check = entry.dagster_event.asset_check_evaluation_data if entry.dagster_event else None
        if check is not None and check.check_name == RUN_CHECK and "partitions_failed" in check.metadata:
            failed: Any = check.metadata["partitions_failed"].value
            return [str(partition["key"]) for partition in failed]
    return []
