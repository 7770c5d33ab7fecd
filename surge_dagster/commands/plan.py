"""The command `plan`: what a run will take, in a few lines, before it is started; `--explain` has
the rest."""

from __future__ import annotations

import re
from typing import Annotated, Any

import numpy as np
import typer

from surge_dagster.commands.settings import CATALOG, SPACE, start_pool, takes_settings
from surge_dagster.config.settings import Settings
from surge_dagster.engine.encoder.costs import EncodeCosts
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.plan.calibrating import io_costs, known_costs
from surge_dagster.engine.plan.calibration_run import calibrate
from surge_dagster.engine.plan.cost_model import CALL_SECONDS
from surge_dagster.engine.plan.planned_run import plan as plan_run
from surge_dagster.engine.plan.planned_run import plan_partitions
from surge_dagster.engine.plan.planner import Fleet, Plan, RunCosts
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.tables.opening import release
from surge_dagster.terminal import Json, messages, print_json

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_USUAL_DIMENSION = 384
_NOT_MEASURED = "not measured yet on this output, counted as free"
_MORE = "--explain has the costs, SuperBatches, storage and memory that this follows from."
_SHOWN_REASONS = 3
_ALL_REFUSED = "Every partition that is left to encode is refused."
_SIZES_UNKNOWN = (
    "There is nothing to predict: the rows of these partitions are counted when they are read."
)


@takes_settings(
    *("source", "output", *SPACE, "devices", "b_min", "b_max", "first_b_min", "memory_limit_bytes"),
    *CATALOG,
    "price_per_hour",
)
def plan(
    settings: Settings,
    calibrate_first: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure on some of the texts first; takes about half a minute."
        ),
    ] = False,
    deadline: Annotated[
        str | None,
        typer.Option(help="Size the workers and machines for it: 90s, 30m, 2h.", metavar="TIME"),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Bytes per second to the output. Default: as measured.", min=1),
    ] = None,
    texts_per_second: Annotated[
        float | None, typer.Option(help="Plan for another machine: speed of one worker.", min=0.001)
    ] = None,
    call_seconds: Annotated[
        float, typer.Option(help="c_ipc in seconds, with --texts-per-second.", min=0)
    ] = CALL_SECONDS,
    workers: Annotated[
        int, typer.Option(help="Encoder workers, with --texts-per-second.", min=1)
    ] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what the prediction follows from.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict what a run takes, from the partitions that are not fresh, some of their texts and
    what was measured."""
    if calibrate_first and texts_per_second is not None:
        raise ConfigError(
            "--calibrate measures this machine, and --texts-per-second describes another: give one."
        )
    seconds = None if deadline is None else _seconds(deadline)
    goals: dict[str, Any] = {
        "price_per_hour": settings.price_per_hour,
        "deadline_seconds": seconds,
        "bandwidth": bandwidth,
    }
    source, store, thresholds = settings.open_source(), settings.open_store(), settings.thresholds()
    partitions, calibrated_on, pool = list(source), "", None
    if texts_per_second is None:
        with start_pool(settings) as pool:
            if calibrate_first:
                with messages.status("measuring on some of the texts"):
                    encoded = calibrate(
                        partitions,
                        settings.output,
                        settings.cloud_options(),
                        pool,
                        thresholds,
                        memory_limit_bytes=settings.memory_limit_bytes,
                    )
                calibrated_on = f"; measured now on {counted(encoded, 'text')}"
        costs = known_costs(pool, store)
        planned = plan_run(
            partitions,
            store,
            pool,
            thresholds,
            memory_limit_bytes=settings.memory_limit_bytes,
            **goals,
        )
    else:
        encode = EncodeCosts.given(call_seconds, 1 / texts_per_second, workers)
        vector_bytes = (settings.dimension or _USUAL_DIMENSION) * np.dtype(settings.dtype).itemsize
        costs = RunCosts(encode, io_costs([]), vector_bytes)
        planned = plan_partitions(partitions, costs, thresholds.resolve(encode.b_min), **goals)
    release(source)
    left_out = {
        "fresh": planned.partitions_fresh,
        "of unknown size": planned.partitions_uncounted,
        "refused": len(planned.partitions_refused),
    }
    lines = [
        f"{counted(number, 'partition')} {why}: not in this plan"
        for why, number in left_out.items()
        if number
    ]
    lines += [failure.reason for failure in planned.partitions_refused[:_SHOWN_REASONS]]
    if planned.partitions:
        lines = [*_lines(planned, settings.price_per_hour), *lines]
        lines += ["", *_explained(planned, costs, pool, calibrated_on)] if explain else [_MORE]
    else:
        nothing = _ALL_REFUSED if planned.partitions_refused else "Nothing is left to encode."
        lines.append(_SIZES_UNKNOWN if planned.partitions_uncounted else nothing)
    print("\n".join(lines))
    if as_json:
        of_pool = (
            {name: getattr(pool, name) for name in ("device", "hardware", "precision", "dimension")}
            if pool
            else {}
        )
        print_json(planned.as_dict() | of_pool)


def _lines(planned: Plan, price_per_hour: float | None) -> list[str]:
    """The time, the cost, the work, and how sure these are."""
    forecast = planned.forecast
    margin = "" if forecast.margin_seconds is None else f" ± {_time(forecast.margin_seconds)}"
    about = "about " if planned.rows_reused else ""
    lines = [
        f"wall time      {_time(forecast.wall_seconds)}{margin}, {forecast.texts_per_second:,.0f} texts/s; "
        f"the first files after {_time(forecast.time_to_first_output_seconds)}",
    ]
    if planned.cost is not None and price_per_hour is not None:
        lines.append(
            f"cost           {cost_text(planned.cost, price_per_hour, planned.cost_per_million_texts)}"
        )
    lines += [
        f"work           {counted(planned.partitions, 'partition')}, {counted(planned.texts, 'text')}"
        + (f", {about}{planned.texts_encoded:,} of them to encode" if planned.rows_reused else "")
        + f"; about {counted(planned.tokens, 'token')}",
        f"known from     {_evidence(planned)}",
    ]
    if planned.fleet is not None:
        lines.append(_fleet(planned.fleet))
    return lines


def cost_text(cost: float, price_per_hour: float, of_million: float | None) -> str:
    """Return what a run costs, at which price, and what a million of its texts cost if it encodes
    any."""
    text = f"{_rounded(cost, 4)} at {price_per_hour:g} an hour"
    return text if of_million is None else f"{text}; {_rounded(of_million, 4)} per million texts"


def _evidence(planned: Plan) -> str:
    """How far texts, costs and storage are known."""
    tokens = "tokens counted" if planned.tokens_counted else "tokens per byte as in earlier runs"
    compared = ", compared with the old files" if planned.rows_reused else ""
    sampled = f"{counted(planned.texts_sampled, 'text')} of {counted(planned.partitions_sampled, 'partition')}"
    margin = (
        "costs as given"
        if planned.forecast.margin_seconds is None
        else "± is that of the measured costs alone"
    )
    storage = "" if planned.forecast.publish_seconds else f"; storage {_NOT_MEASURED}"
    return f"{sampled}: {tokens}{compared}; {margin}{storage}"


def _explained(
    planned: Plan, costs: RunCosts, pool: EncoderPool | None, calibrated_on: str
) -> list[str]:
    """What the plan follows from: costs, SuperBatches, storage, memory, and the paper's model."""
    bounds = planned.bounds
    mean = f"; texts of {planned.text_bytes / planned.texts:,.0f} bytes" if planned.texts else ""
    where = f"{pool.device} ({pool.hardware}), {pool.precision}, " if pool else ""
    call = _with_margin(planned.call_seconds, planned.call_margin)
    text = _with_margin(planned.text_seconds, planned.text_margin)
    lengths = ", ".join(
        f"{_time(cost)} of {tokens}" for tokens, (cost, _) in planned.text_seconds_by_tokens.items()
    )
    return [
        f"{counted(planned.partitions, 'partition')}, {counted(planned.texts, 'text')}, "
        f"the largest has {planned.largest_partition_texts:,}{mean}",
        f"{where}{counted(planned.workers, 'worker')}{calibrated_on}",
        f"a call costs {call}, a text {text} of a worker"
        + (f"; by tokens: {lengths}" if pool else ""),
        "",
        f"SuperBatches   {planned.superbatches:,}, of {bounds.b_min:,} to {bounds.b_max:,} texts, the first of "
        f"{bounds.first_b_min or bounds.b_min:,}; the mean is {planned.fill_ratio:.2f} of b_min",
        f"storage        {_storage(planned, costs)}",
        f"memory         {_memory(planned)}",
        "",
        f"Partition by partition the encoding would take {_time(planned.partition_by_partition_seconds)}: "
        f"speedup {planned.speedup:.2f} (alpha {planned.alpha:.3f}).",
        planned.verdict,
        f"{planned.phi:.0%} of the partitions are below n* = {planned.break_even_texts:,.1f} texts "
        f"(phi {planned.phi:.2f}); the spread of their sizes is CV {planned.cv:.2f}. "
        f"The SURGE paper's table says of these: {planned.paper_recommendation}.",
    ]


def _storage(planned: Plan, costs: RunCosts) -> str:
    forecast = planned.forecast
    if not forecast.publish_seconds:
        return f"{_NOT_MEASURED}: --calibrate or the first run does"
    of_file, of_byte = costs.io.write.values
    text = (
        f"a file costs {_time(of_file)} and a megabyte {_time(1e6 * of_byte)} of a thread; "
        f"{forecast.overlap_ratio:.0%} of it hides behind encoding; it serves up to "
        f"{counted(planned.workers_per_machine or 1, 'such worker')}"
    )
    if forecast.exposed_io_seconds > 0.01 * forecast.wall_seconds:
        text += f", {_time(forecast.exposed_io_seconds)} of waiting for it do not"
    return text


def _memory(planned: Plan) -> str:
    largest = f"{planned.peak_superbatch_bytes / 1e6:,.1f} MB in the largest SuperBatch"
    if planned.peak_resident_bytes is None or planned.memory_limit_bytes is None:
        return f"{largest}, never above {planned.bound_superbatch_bytes / 1e6:,.1f} MB"
    peak, limit = planned.peak_resident_bytes / 1e6, planned.memory_limit_bytes / 1e6
    return f"up to {peak:,.0f} MB of data, {largest}; never above {limit:,.0f} MB"


def _fleet(fleet: Fleet) -> str:
    workers, machines = counted(fleet.workers, "worker"), counted(fleet.machines, "machine")
    if fleet.wall_seconds > fleet.deadline_seconds * (1 + 1e-9):  # it may be met to the last digit
        return (
            f"No number of workers ends within {_time(fleet.deadline_seconds)}: calls and storage alone take too long; "
            f"{workers} on {machines} would need {_time(fleet.wall_seconds)}."
        )
    return f"Within {_time(fleet.deadline_seconds)}: {workers} on {machines}, {_time(fleet.wall_seconds)}."


def _with_margin(seconds: float, margin: float | None) -> str:
    return f"{_rounded(1e3 * seconds, 3)} ms" + (
        f" ± {_rounded(1e3 * margin, 2)}" if margin is not None else ""
    )


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{_rounded(1e3 * seconds, 3)} ms"
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _rounded(value: float, digits: int) -> str:
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ConfigError(f"--deadline takes a time such as 90s, 30m or 2h; {text!r} was given.")
    return float(match[1]) * _UNITS[match[2]]
