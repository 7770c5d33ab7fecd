"""The sensors that call alert hooks: one hears of runs that failed, one reads the figures of SuperBatches.

They exist only where somebody is to be told, and are on from the start. The first tick of each tells of nothing: what
was there before is not news.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import dagster as dg
from dagster._core.storage.tags import WILL_RETRY_TAG

from surge_dagster.alerts import PATIENCE_SECONDS, Alert, AlertHook, Deliveries, Webhook
from surge_dagster.assets.superbatches import figures_of
from surge_dagster.engine.report import is_slow
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.run_assets import embeds, switches
from surge_dagster.settings import Settings

_SENSOR_SECONDS = 30
_PARTITIONS_NAMED = 20
_MESSAGE_CHARACTERS = 4000
_EVENTS_PER_TICK = 5000
_RUNS_REMEMBERED = 20
WAIT_SECONDS_PER_TICK = 30.0


def alert_sensors(names: CatalogNames, settings: Settings, alerts: Sequence[AlertHook]) -> list[dg.SensorDefinition]:
    """The sensors of a catalog's alerts; none where nobody is to be told.

    Args:
        alerts: hooks to call, beside the webhook of the settings.
    """
    hooks = list(alerts)
    if settings.alert_webhook is not None:
        hooks.append(Webhook(settings.alert_webhook.get_secret_value()))
    if not hooks:
        return []
    deliveries = Deliveries(hooks)
    return [_failed_runs(names, settings, deliveries), _slow_superbatches(names, settings, deliveries)]


def _failed_runs(names: CatalogNames, settings: Settings, deliveries: Deliveries) -> dg.SensorDefinition:
    # Of all runs, since one that is launched in the UI for an asset is of no job of ours, nor is a user's own job.
    @dg.run_failure_sensor(
        name=names.failure_alerts,
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells of runs of this catalog that failed and will not be launched again, with their partitions.",
    )
    def sensor(context: dg.RunFailureSensorContext) -> None:
        run = context.dagster_run
        if not _is_ours(names, context.instance, run) or run.tags.get(WILL_RETRY_TAG) == "true":
            return
        keys, count = _failed_partitions(names, context.instance, run.run_id)
        message = "\n".join((f"{run.job_name} failed.", *_reasons(context)))[:_MESSAGE_CHARACTERS]
        link = _link(settings, run.run_id)
        alert = Alert(names.name or "", "run_failed", run.run_id, message, keys, count, link)
        deliveries.deliver(alert, context.log)

    return sensor


def _slow_superbatches(names: CatalogNames, settings: Settings, deliveries: Deliveries) -> dg.SensorDefinition:
    @dg.sensor(
        name=names.slow_alerts,
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells, once per run, of SuperBatches that took much longer per token than those before them.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        instance = context.instance
        cursor = _read_cursor(context.cursor)
        if cursor is None:
            newest = instance.fetch_materializations(names.superbatches, limit=1).records
            start = {"after": newest[0].storage_id if newest else 0, "told": []}
            return dg.SensorResult(skip_reason="from now on", cursor=json.dumps(start))
        records = instance.fetch_materializations(
            dg.AssetRecordsFilter(names.superbatches, after_storage_id=cursor["after"]),
            limit=_EVENTS_PER_TICK,
            ascending=True,
        ).records
        slow: dict[str, list[dict[str, Any]]] = {}
        first_of: dict[str, int] = {}  # the storage id of a run's first one
        seen = 0
        for record in records:
            cursor["after"] = record.storage_id
            figures = figures_of(record.asset_materialization) if record.asset_materialization else None
            if figures is None:
                continue
            seen += 1
            if is_slow(figures.get("pace_ratio"), figures.get("encode_seconds", 0.0)):
                slow.setdefault(record.run_id, []).append(figures)
                first_of.setdefault(record.run_id, record.storage_id)
        deadline = time.monotonic() + WAIT_SECONDS_PER_TICK
        for run_id, found in slow.items():
            if run_id not in cursor["told"]:
                if time.monotonic() >= deadline:
                    cursor["after"] = first_of[run_id] - 1  # this one and those after it are for the next tick
                    break
                link = _link(settings, run_id)
                alert = Alert(names.name or "", "slow_superbatch", run_id, _slow_message(found), link=link)
                patience = min(PATIENCE_SECONDS, max(0.0, deadline - time.monotonic()))
                deliveries.deliver(alert, context.log, patience_seconds=patience)
                cursor["told"] = [*cursor["told"], run_id][-_RUNS_REMEMBERED:]
        told = f"{seen:,} SuperBatches, {sum(map(len, slow.values())):,} of them slow"
        return dg.SensorResult(skip_reason=told, cursor=json.dumps(cursor))

    return sensor


def _is_ours(names: CatalogNames, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    return run.job_name in names.jobs or embeds(names, instance, run) or switches(names, instance, run)


def _reasons(context: dg.RunFailureSensorContext) -> list[str]:
    """Why a run failed: what its steps said, or what Dagster says of the run."""
    found = []
    for event in context.get_step_failure_events():
        data = event.step_failure_data
        ours = data.user_failure_data.description if data.user_failure_data else None
        found.append(ours or (data.error.message.strip() if data.error else ""))
    return [reason for reason in found if reason] or [context.failure_event.message or ""]


def _failed_partitions(names: CatalogNames, instance: dg.DagsterInstance, run_id: str) -> tuple[tuple[str, ...], int]:
    """Catalog keys of what a run refused, the first of them, and how many; none where it died before it could say."""
    for entry in reversed(instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)):
        check = entry.dagster_event.asset_check_evaluation_data if entry.dagster_event else None
        if check is not None and check.asset_check_key == names.run_check and "partitions_failed" in check.metadata:
            failed: Any = check.metadata["partitions_failed"].value
            return tuple(str(one["key"]) for one in failed[:_PARTITIONS_NAMED]), len(failed)
    return (), 0


def _slow_message(found: Sequence[dict[str, Any]]) -> str:
    worst = max(found, key=lambda figures: figures["pace_ratio"])
    return (
        f"{len(found):,} SuperBatches were slow. SuperBatch {worst['superbatch']} with {worst['texts']:,} texts took "
        f"{worst['encode_seconds']:.1f} s, {worst['pace_ratio']:.1f} times as long per token as those before it. Look "
        "whether something else uses the device or slows it down."
    )


def _link(settings: Settings, run_id: str) -> str | None:
    return f"{settings.webserver_url.rstrip('/')}/runs/{run_id}" if settings.webserver_url else None


def _read_cursor(text: str | None) -> dict[str, Any] | None:
    try:
        cursor = json.loads(text or "")
        return {"after": int(cursor["after"]), "told": [str(run_id) for run_id in cursor["told"]]}
    except (ValueError, TypeError, KeyError):
        return None
