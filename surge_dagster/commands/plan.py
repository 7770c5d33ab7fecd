"""The command `plan`: what a run will take, on one screen, before it is started."""

from __future__ import annotations

import contextlib
import re
from typing import Annotated

import numpy as np
import typer

from surge_dagster.commands.settings import CATALOG, SPACE, start_pool, takes_settings
from surge_dagster.config.settings import Settings
from surge_dagster.engine.encoder.costs import EncodeCosts
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.model.spec import FileFormat, Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.plan.calibrating import io_costs, known_costs
from surge_dagster.engine.plan.calibration_run import calibrate, estimate_bytes
from surge_dagster.engine.plan.cost_model import CALL_SECONDS
from surge_dagster.engine.plan.planner import Fleet, Plan, RunCosts
from surge_dagster.engine.plan.planner import plan as make_plan
from surge_dagster.engine.run.embedding_run import publishing_threads
from surge_dagster.engine.run.memory import fit_memory
from surge_dagster.engine.sources import release
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.process_memory import memory_bytes
from surge_dagster.terminal import Json, messages, print_json

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_USUAL_DIMENSION = 384
_SIZES_UNKNOWN = "There is nothing to predict: the rows of these partitions are counted when they are read."


@takes_settings(
    *("source", "output", *SPACE, "devices", "b_min", "b_max", "first_b_min", "memory_limit_bytes", "format"),
    *CATALOG[1:],
)
def plan(
    settings: Settings,
    calibrate_first: Annotated[
        bool, typer.Option("--calibrate", help="Measure on some of the texts first; takes about half a minute.")
    ] = False,
    price_per_hour: Annotated[float | None, typer.Option(help="Price of this machine per hour.", min=0)] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Size the workers and machines for it: 90s, 30m, 2h.", metavar="TIME")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second to the output. Default: as measured.", min=1)
    ] = None,
    texts_per_second: Annotated[
        float | None, typer.Option(help="Plan for another machine: speed of one worker.", min=0.001)
    ] = None,
    call_seconds: Annotated[
        float, typer.Option(help="c_ipc in seconds, with --texts-per-second.", min=0)
    ] = CALL_SECONDS,
    workers: Annotated[int, typer.Option(help="Encoder workers, with --texts-per-second.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Predict what a run takes, from the sizes of the partitions that are not fresh and what was measured.

    Where a partition was embedded before and has changed, all of its rows count as new.
    """
    if calibrate_first and texts_per_second is not None:
        raise ConfigError("--calibrate measures this machine, and --texts-per-second describes another: give one.")
    seconds = None if deadline is None else _seconds(deadline)
    source, store, thresholds = settings.open_source(), settings.open_store(), settings.thresholds()
    partitions, listed = list(source), None
    memory, calibrated_on, pool = None, "", None
    if texts_per_second is None:
        with start_pool(settings) as pool:
            if calibrate_first:
                with messages.status("measuring on some of the texts"):
                    encoded = calibrate(
                        partitions,
                        settings.output,
                        settings.storage_options.options(),
                        pool,
                        settings.format,
                        thresholds,
                        memory_limit=settings.memory_limit_bytes,
                    )
                calibrated_on = f"; measured now on {counted(encoded, 'text')}"
        listed = len(partitions)
        partitions = _with_work(partitions, store, pool.space, settings.format)
        costs = known_costs(pool, store)
        bounds, memory = fit_memory(
            thresholds,
            costs.encode.efficient_texts,
            pool.space,
            publishing_threads(store, costs.encode.workers),
            settings.memory_limit_bytes,
            machine_bytes=memory_bytes(),
            upload_bytes=store.upload_bytes,
        )
    else:
        encode = EncodeCosts.given(call_seconds, 1 / texts_per_second, workers)
        vector_bytes = (settings.dimension or _USUAL_DIMENSION) * np.dtype(settings.dtype).itemsize
        costs = RunCosts(encode, io_costs([]), vector_bytes)
        bounds = thresholds.resolve(encode.efficient_texts)
    counted_ones = [partition for partition in partitions if partition.rows is not None]
    text_bytes, beside_bytes = estimate_bytes(counted_ones)
    release(source)
    made = make_plan(
        [partition.rows or 0 for partition in counted_ones],
        text_bytes,
        costs,
        bounds,
        beside_bytes=beside_bytes,
        memory=memory,
        price_per_hour=price_per_hour,
        deadline_seconds=seconds,
        bandwidth=bandwidth,
    )
    if counted_ones:
        lines = _lines(made, costs, pool, calibrated_on, price_per_hour)
    else:
        lines = [_SIZES_UNKNOWN if partitions else "Nothing is left to encode."]
    print("\n".join([*_left_out(partitions, listed), *lines]))
    if as_json:
        of_pool = (
            {name: getattr(pool, name) for name in ("device", "hardware", "precision", "dimension")} if pool else {}
        )
        print_json(made.as_dict() | of_pool)


def _with_work(partitions: list[Partition], store: Store, space: Space, file_format: FileFormat) -> list[Partition]:
    """The partitions that a run would not pass over."""
    own = next((one for one in list_spaces(store) if one.spec_sha256 == space.spec_sha256), space)
    outputs, left = OutputState(store, own.name, file_format), list[Partition]()
    for partition in outputs.looked_at(partitions):
        with contextlib.suppress(TransientError, ValueError):  # the run will say what is wrong with it
            if outputs.status(partition) == "fresh":
                continue
        left.append(partition)
    return left


def _left_out(partitions: list[Partition], listed: int | None) -> list[str]:
    """What the prediction does not count."""
    lines = list[str]()
    if listed is not None and listed > len(partitions):
        lines.append(f"{counted(listed - len(partitions), 'partition')} fresh: not in what follows")
    if uncounted := sum(partition.rows is None for partition in partitions):
        lines.append(f"{counted(uncounted, 'partition')} of unknown size: not in what follows")
    return lines


def _lines(
    made: Plan,
    costs: RunCosts,
    pool: EncoderPool | None,
    calibrated_on: str,
    price_per_hour: float | None,
) -> list[str]:
    found, bounds = made.forecast, made.bounds
    mean = f"; texts of {made.text_bytes / made.texts:,.0f} bytes" if made.texts else ""
    where = f"{pool.device} ({pool.hardware}), {pool.precision}, " if pool else ""
    call, text = _with_margin(made.call_seconds, made.call_margin), _with_margin(made.text_seconds, made.text_margin)
    lengths = ", ".join(f"{_time(cost)} of {tokens}" for tokens, (cost, _) in made.text_seconds_by_tokens.items())
    margin = "" if found.margin_seconds is None else f" ± {_time(found.margin_seconds)}"
    lines = [
        f"{counted(made.partitions, 'partition')}, {counted(made.texts, 'text')}, "
        f"the largest has {made.largest_partition_texts:,}{mean}",
        f"{where}{counted(made.workers, 'worker')}{calibrated_on}",
        f"a call costs {call}, a text {text} of a worker" + (f"; by tokens: {lengths}" if pool else ""),
        "",
        f"wall time      {_time(found.wall_seconds)}{margin}, {found.texts_per_second:,.0f} texts/s; "
        f"the first files after {_time(found.time_to_first_output_seconds)}",
        f"SuperBatches   {made.superbatches:,}, of {bounds.b_min:,} to {bounds.b_max:,} texts, the first of "
        f"{bounds.first_b_min or bounds.b_min:,}; the mean is {made.fill_ratio:.2f} of b_min",
        f"storage        {_storage(made, costs)}",
        f"memory         {_memory(made)}",
    ]
    if made.cost_per_million_texts is not None:
        lines.append(
            f"cost           {_rounded(made.cost_per_million_texts, 4)} per million texts at {price_per_hour:g} an hour"
        )
    lines += [
        "",
        f"Partition by partition the encoding would take {_time(made.partition_by_partition_seconds)}: "
        f"speedup {made.speedup:.2f} (alpha {made.alpha:.3f}).",
        f"{made.phi:.0%} of the partitions are below n* = {made.break_even_texts:,.1f} texts (phi {made.phi:.2f}); "
        f"the spread of their sizes is CV {made.cv:.2f}.",
        made.verdict,
    ]
    if made.fleet is not None:
        lines.append(_fleet(made.fleet, made))
    return lines


def _storage(made: Plan, costs: RunCosts) -> str:
    found = made.forecast
    if not found.publish_seconds:
        return "not measured yet on this output: --calibrate or the first run does; counted as free here"
    of_file, of_byte = costs.io.write.values
    text = (
        f"a file costs {_time(of_file)} and a megabyte {_time(1e6 * of_byte)} of a "
        f"thread; {found.overlap_ratio:.0%} of it hides behind encoding; it serves up to "
        f"{counted(made.workers_per_machine or 1, 'such worker')}"
    )
    if found.exposed_io_seconds > 0.01 * found.wall_seconds:
        text += f", {_time(found.exposed_io_seconds)} of waiting for it do not"
    return text


def _memory(made: Plan) -> str:
    largest = f"{made.peak_superbatch_bytes / 1e6:,.1f} MB in the largest SuperBatch"
    if made.peak_resident_bytes is None or made.memory_limit_bytes is None:
        return f"{largest}, never above {made.bound_superbatch_bytes / 1e6:,.1f} MB"
    peak, limit = made.peak_resident_bytes / 1e6, made.memory_limit_bytes / 1e6
    return f"up to {peak:,.0f} MB of data, {largest}; never above {limit:,.0f} MB"


def _fleet(fleet: Fleet, made: Plan) -> str:
    workers, machines = counted(fleet.workers, "worker"), counted(fleet.machines, "machine")
    if fleet.wall_seconds > fleet.deadline_seconds * (1 + 1e-9):  # it may be met to the last digit
        return (
            f"No number of workers ends within {_time(fleet.deadline_seconds)}: calls and storage alone take too long; "
            f"{workers} on {machines} would need {_time(fleet.wall_seconds)}."
        )
    return f"Within {_time(fleet.deadline_seconds)}: {workers} on {machines}, {_time(fleet.wall_seconds)}."


def _with_margin(seconds: float, margin: float | None) -> str:
    return f"{_rounded(1e3 * seconds, 3)} ms" + (f" ± {_rounded(1e3 * margin, 2)}" if margin is not None else "")


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
