"""The command `plan`: what a run will take, in a few lines, before it is started; `--explain` has
the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from surge_dagster.commands.settings import CATALOG, SPACE, start_pool, takes_settings
from surge_dagster.config.settings import Settings
from surge_dagster.engine.encoder.speed import Speed
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.plan.cost_model import CALL_SECONDS, io_costs
from surge_dagster.engine.plan.planned_run import calibrate, known_costs, plan_partitions
from surge_dagster.engine.plan.planned_run import plan as plan_run
from surge_dagster.engine.plan.planner import Fleet, Goals, PaperModel, Plan, RunCosts
from surge_dagster.engine.run.report import Prices
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted
from surge_dagster.terminal import Json, messages, print_json

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_USUAL_DIMENSION = 384
_POOL_FACTS = ("device", "hardware", "precision", "dimension")
_NOT_MEASURED = "not measured yet on this output, counted as free"
_MORE = "--explain has the costs, SuperBatches, storage and memory that this follows from."
_SHOWN_REASONS = 3
_ALL_REFUSED = "Every partition that is left to encode is refused."
_SIZES_UNKNOWN = (
    "There is nothing to predict: the rows of these partitions are counted when they are read."
)


Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate", help="Measure on some of the texts first; takes about half a minute."
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option(help="Size the workers and machines for it: 90s, 30m, 2h.", metavar="TIME"),
]
TextsPerSecond = Annotated[
    float | None, typer.Option(help="Plan for another machine: speed of one worker.", min=0.001)
]
Workers = Annotated[int, typer.Option(help="Encoder workers, with --texts-per-second.", min=1)]
Explain = Annotated[bool, typer.Option("--explain", help="Show what the prediction follows from.")]


@takes_settings(
    *("source", "output", *SPACE, "devices", "b_min", "b_max", "first_b_min", "memory_limit_bytes"),
    *CATALOG,
    *("price_per_hour", "price_per_million_tokens", "max_cost"),
)
def plan(
    settings: Settings,
    calibrate_first: Calibrate = False,
    deadline: Deadline = None,
    texts_per_second: TextsPerSecond = None,
    workers: Workers = 1,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Predict what a run takes, from the partitions that are not fresh, some of their texts and
    what was measured."""
    if calibrate_first and texts_per_second is not None:
        raise ConfigError(
            "--calibrate measures this machine, and --texts-per-second describes another: give one."
        )
    deadline_seconds = None if deadline is None else _seconds(deadline)
    prices = settings.prices()
    texts_per_minute = None
    endpoint = settings.endpoint()
    if endpoint is not None and endpoint.requests_per_minute is not None:
        texts_per_minute = endpoint.requests_per_minute * endpoint.most_texts
    goals = Goals(prices, deadline_seconds, settings.encoder_tokens_per_minute, texts_per_minute)
    source = settings.open_source()
    if texts_per_second is None:
        shown = _planned_here(settings, list(source), goals, calibrate_first)
    else:
        speed = Speed.given(CALL_SECONDS, 1 / texts_per_second, workers)
        shown = _planned_elsewhere(settings, list(source), goals, speed)

    print("\n".join(_summary(shown, prices, explain)))
    if as_json:
        print_json(shown.plan.as_dict() | shown.pool)


@dataclass(frozen=True, slots=True)
class _Shown:
    """A plan, and what it was made of.

    Attributes:
        pool: facts of this machine's encoder; empty for another machine.
    """

    plan: Plan
    costs: RunCosts
    pool: dict[str, Any] = field(default_factory=dict)


def _planned_here(
    settings: Settings, partitions: list[Partition], goals: Goals, calibrate_first: bool
) -> _Shown:
    store = settings.open_store()
    thresholds = settings.thresholds()
    memory_limit_bytes = settings.memory_limit_bytes
    with start_pool(settings) as pool:
        if calibrate_first:
            with messages.status("measuring on some of the texts"):
                calibrate(
                    partitions,
                    settings.output,
                    settings.cloud_options(),
                    pool,
                    thresholds,
                    memory_limit_bytes=memory_limit_bytes,
                )
        costs = known_costs(pool, store)
        planned = plan_run(
            partitions, store, pool, thresholds, memory_limit_bytes=memory_limit_bytes, goals=goals
        )
        facts = {name: getattr(pool, name) for name in _POOL_FACTS}
    return _Shown(planned, costs, facts)


def _planned_elsewhere(
    settings: Settings, partitions: list[Partition], goals: Goals, speed: Speed
) -> _Shown:
    vector_bytes = (settings.dimension or _USUAL_DIMENSION) * np.dtype(settings.dtype).itemsize
    costs = RunCosts(speed, io_costs([]), vector_bytes)
    bounds = settings.thresholds().resolve(speed.b_min)
    planned = plan_partitions(partitions, costs, bounds, goals=goals)
    return _Shown(planned, costs)


def _summary(shown: _Shown, prices: Prices, explain: bool) -> list[str]:
    planned = shown.plan
    if not planned.partitions:
        return [*_left_out(planned), _why_nothing(planned)]

    lines = _lines(shown, prices) + _left_out(planned)
    if explain:
        return [*lines, "", *_explained(shown)]
    return [*lines, _MORE]


def _left_out(planned: Plan) -> list[str]:
    """Say which partitions are not in the plan, and why."""
    counts = {
        "fresh": planned.partitions_fresh,
        "of unknown size": planned.partitions_uncounted,
        "refused": len(planned.partitions_refused),
    }
    lines: list[str] = []
    for why, number in counts.items():
        if number:
            lines.append(f"{counted(number, 'partition')} {why}: not in this plan")
    return lines + [failure.reason for failure in planned.partitions_refused[:_SHOWN_REASONS]]


def _why_nothing(planned: Plan) -> str:
    if planned.partitions_uncounted:
        return _SIZES_UNKNOWN
    if planned.partitions_refused:
        return _ALL_REFUSED
    return "Nothing is left to encode."


def _lines(shown: _Shown, prices: Prices) -> list[str]:
    """Say the time, the cost, the work, and how sure these are."""
    planned = shown.plan
    forecast = planned.forecast
    wall = _time(forecast.wall_seconds)
    if forecast.margin_seconds is not None:
        wall += f" ± {_time(forecast.margin_seconds)}"
    first = _time(forecast.time_to_first_output_seconds)
    lines = [
        f"wall time      {wall}, {forecast.texts_per_second:,.0f} texts/s; "
        f"the first files after {first}",
    ]
    if planned.cost is not None:
        cost = cost_text(planned.cost, prices, planned.cost_per_million_texts)
        lines.append(f"cost           {cost}{_limit(planned, prices)}")

    work = f"{counted(planned.partitions, 'partition')}, {counted(planned.texts, 'text')}"
    if planned.rows_reused:
        work += f", about {planned.texts_encoded:,} of them to encode"
    lines.append(f"work           {work}; about {counted(planned.tokens, 'token')}")
    lines.append(f"known from     {_evidence(shown)}")
    if planned.fleet is not None:
        lines.append(_fleet(planned.fleet))
    return lines


def _limit(planned: Plan, prices: Prices) -> str:
    """Say that a run ends before it has encoded all."""
    of_tokens = Prices(per_million_tokens=prices.per_million_tokens).cost(0, planned.tokens)
    if prices.max_cost is None or of_tokens is None or of_tokens <= prices.max_cost:
        return ""
    return f"; a run ends before its tokens cost more than max_cost, {prices.max_cost:g}"


def cost_text(cost: float, prices: Prices, of_million: float | None) -> str:
    """Return what a run costs, at which prices, and what a million of its texts cost if it encodes
    any."""
    text = f"{_rounded(cost, 4)} at {prices}"
    if of_million is not None:
        text += f"; {_rounded(of_million, 4)} per million texts"
    return text


def _evidence(shown: _Shown) -> str:
    """Say how far texts, costs and storage are known."""
    planned = shown.plan
    texts = counted(planned.texts_sampled, "text")
    partitions = counted(planned.partitions_sampled, "partition")
    tokens = "tokens per byte as in earlier runs"
    if planned.tokens_counted:
        tokens = "tokens counted"

    line = f"{texts} of {partitions}: {tokens}"
    if planned.rows_reused:
        line += ", compared with the old files"
    if not shown.pool:
        line += "; costs as given"
    elif planned.forecast.margin_seconds is not None:
        line += "; ± is how far the SuperBatches of earlier runs differ"
    if not planned.forecast.publish_seconds:
        line += f"; storage {_NOT_MEASURED}"
    return line


def _explained(shown: _Shown) -> list[str]:
    """Say what the plan follows from: costs, SuperBatches, storage, memory, the paper's model."""
    planned = shown.plan
    catalog = f"{counted(planned.partitions, 'partition')}, {counted(planned.texts, 'text')}"
    catalog += f", the largest has {planned.largest_partition_texts:,}"
    if planned.texts:
        catalog += f"; texts of {planned.text_bytes / planned.texts:,.0f} bytes"
    return [
        catalog,
        *_machine(shown),
        "",
        f"SuperBatches   {_superbatches(planned)}",
        f"storage        {_storage(planned, shown.costs)}",
        f"memory         {_memory(planned)}",
        "",
        *_of_paper(planned.paper),
    ]


def _machine(shown: _Shown) -> list[str]:
    """Say which machine the plan is for, and what a call and a text cost there."""
    planned = shown.plan
    machine = counted(planned.workers, "worker")
    costs = f"a call costs {_milliseconds(planned.call_seconds)}"
    costs += f", a text {_milliseconds(planned.text_seconds)} of a worker"
    if shown.pool:
        machine = "{device} ({hardware}), {precision}, ".format(**shown.pool) + machine
    return [machine, costs]


def _superbatches(planned: Plan) -> str:
    bounds = planned.bounds
    first = bounds.first_b_min or bounds.b_min
    return (
        f"{planned.superbatches:,}, of {bounds.b_min:,} to {bounds.b_max:,} texts, the first of "
        f"{first:,}; the mean is {planned.fill_ratio:.2f} of b_min"
    )


def _of_paper(paper: PaperModel) -> list[str]:
    """Say what the SURGE paper's model predicts for these partitions."""
    seconds = _time(paper.partition_by_partition_seconds)
    return [
        f"Partition by partition the encoding would take {seconds}: speedup {paper.speedup:.2f} "
        f"(alpha {paper.alpha:.3f}).",
        paper.verdict,
        f"{paper.phi:.0%} of the partitions are below n* = {paper.break_even_texts:,.1f} texts "
        f"(phi {paper.phi:.2f}); the spread of their sizes is CV {paper.cv:.2f}. "
        f"The SURGE paper's table says of these: {paper.paper_recommendation}.",
    ]


def _storage(planned: Plan, costs: RunCosts) -> str:
    if not planned.forecast.publish_seconds:
        return f"{_NOT_MEASURED}: --calibrate or the first run does"
    _, of_file, of_byte = costs.io.publish
    return (
        f"a file costs {_time(of_file)} and a megabyte {_time(1e6 * of_byte)}; "
        f"{planned.forecast.overlap_ratio:.0%} of it hides behind encoding"
    )


def _memory(planned: Plan) -> str:
    if planned.peak_resident_bytes is None or planned.memory_limit_bytes is None:
        return "not known of another machine"
    peak = planned.peak_resident_bytes / 1e6
    limit = planned.memory_limit_bytes / 1e6
    return f"up to {peak:,.0f} MB of data; never above {limit:,.0f} MB"


def _fleet(fleet: Fleet) -> str:
    workers = counted(fleet.workers, "worker")
    machines = counted(fleet.machines, "machine")
    deadline = _time(fleet.deadline_seconds)
    wall = _time(fleet.wall_seconds)
    if fleet.wall_seconds > fleet.deadline_seconds:
        return (
            f"No number of workers ends within {deadline}: calls and storage take longer. "
            f"{workers} on {machines} would need {wall}."
        )
    return f"Within {deadline}: {workers} on {machines}, {wall}."


def _milliseconds(seconds: float) -> str:
    return f"{_rounded(1e3 * seconds, 3)} ms"


def _time(seconds: float) -> str:
    if seconds < 1:
        return _milliseconds(seconds)
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
