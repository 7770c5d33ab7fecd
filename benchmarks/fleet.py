"""How well fleets of machines are used over Ray: measured costs, simulated machines.

    python -m benchmarks.fleet [--scenarios costs,efficiency,ends] [--quick]

- costs: what the product takes in addition to encoding, measured here: events of 1 to 64 writers on
  one Postgres, lists, publishing, the driver of a cluster.
- efficiency: of fleets of 1 to 1,000 machines over 40,000 partitions of log-normal sizes: the work,
  through what all machines could have encoded until the run ends. Speeds are spread by 10 %, 2 % of
  the machines have half the speed, 10 % are preempted in an hour, and each starts cold. *Calm* is
  without preemptions, *wave* with 30 % in a minute.
- ends: the largest fleets that are used well, and those at which more machines stop to pay.

The others follow from the costs, so *costs* is always included. `make bench-cluster` compares the
simulator with real Ray. Prints a table and, as the last line of standard output, one JSON document.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise

from benchmarks.fleet_costs import FULL, QUICK, FleetCosts, measure_costs
from benchmarks.fleet_simulation import Catalog, Faults, Outcome
from benchmarks.fleet_ways import RayWay
from benchmarks.harness import (
    Document,
    Scenarios,
    Target,
    add_quick,
    at_most,
    command_line,
    names_of,
    numbers,
    print_scenarios,
    say,
    start_document,
)
from surge_dagster.catalogs.synthetic import LOG_SIGMA, MEAN_BYTES
from surge_dagster.engine.model.locating import DEFAULT_MODEL

SIGMAS = (1.0, LOG_SIGMA, 2.5)
FAULTS = {"preempted": Faults(), "calm": Faults(lost_per_hour=0.0), "wave": Faults(wave=0.3)}
WELL = 0.92  # the efficiency down to which machines are said to be used well
# More machines pay while twice as many need at most so much of the time.
PAYS = 0.75


def measure(arguments: argparse.Namespace) -> Document:
    """Measure the costs, simulate what is requested, and give the document."""
    requested = set(arguments.scenarios)
    document = start_document(
        "fleet", arguments, ("dagster", "dagster-postgres", "psycopg2-binary", "ray")
    )
    say("costs")
    costs, extra = measure_costs(QUICK if arguments.quick else FULL, arguments.model)
    document["costs"] = asdict(costs) | extra
    simulator = Simulator(arguments, costs)
    if "efficiency" in requested:
        say("efficiency")
        document["efficiency"] = simulator.efficiencies()
    if "ends" in requested:
        say("ends")
        document["ends"] = simulator.ends()
    return document


class Simulator:
    """Simulates fleets with the settings of the command line."""

    def __init__(self, arguments: argparse.Namespace, costs: FleetCosts) -> None:
        self._arguments, self._costs = arguments, costs
        self._machines = [round(count) for count in arguments.machines]

    def efficiencies(self) -> list[Document]:
        """Rows of a catalog and a kind of faults, with the outcome for each number of machines."""
        rows = list[Document]()
        for sigma in SIGMAS:
            catalog = self._catalog(sigma, 1.0)
            for name in FAULTS if sigma == LOG_SIGMA else ("preempted",):
                say(f"  sigma {sigma}, {name}")
                outcomes = [self._outcome(catalog, count, FAULTS[name]) for count in self._machines]
                row = {"sigma": sigma, "faults": name, "catalog_bytes": catalog.text_bytes}
                rows.append(
                    row
                    | {"machines": self._machines, "outcomes": [asdict(each) for each in outcomes]}
                )
        return rows

    def ends(self) -> list[Document]:
        """By share of the texts: up to how many machines they are used well, and more of them pay."""
        counts = [2**power for power in range(round(max(self._machines)).bit_length() + 1)]
        return [self._end(LOG_SIGMA, share, counts) for share in (0.1, 0.01)]

    def _end(self, sigma: float, share: float, counts: Sequence[int]) -> Document:
        say(f"  sigma {sigma}, {share:g} of the texts")
        catalog = self._catalog(sigma, share)
        by_count = {count: self._outcome(catalog, count, FAULTS["preempted"]) for count in counts}
        used_well = [count for count in counts if by_count[count].efficiency >= WELL]
        pays = 1
        for fewer, more in pairwise(counts):
            if by_count[more].seconds > PAYS * by_count[fewer].seconds:
                break
            pays = more
        return {
            "sigma": sigma,
            "hours": self._arguments.hours * share,
            "used_well": max(used_well, default=0),
            "pays": pays,
            "seconds": by_count[pays].seconds,
            "efficiencies": {count: outcome.efficiency for count, outcome in by_count.items()},
        }

    def _catalog(self, sigma: float, share: float) -> Catalog:
        arguments = self._arguments
        texts = round(arguments.hours * share * 3600 * arguments.texts_per_second)
        return Catalog.of(texts, arguments.partitions, sigma)

    def _outcome(self, catalog: Catalog, machines: int, faults: Faults) -> Outcome:
        arguments = self._arguments
        faults = replace(
            faults, cold_seconds=arguments.cold_seconds, replaced_seconds=arguments.replaced_seconds
        )
        speed = arguments.texts_per_second * MEAN_BYTES
        return RayWay(
            catalog, machines, speed, self._costs, faults, arguments.seed, held=arguments.held
        ).run()


def cost_lines(costs: Document) -> Iterator[str]:
    for name, value in costs.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{count:,}: {seconds:.4g}" for count, seconds in value.items())
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        yield f"{name:28}{shown}"


def cost_targets(costs: Document) -> Iterator[Target]:
    cpu = costs.get("postgres_cpu_milliseconds")
    yield at_most(
        "ms of Postgres' CPU per partition, most writers",
        2.0,
        cpu,
        note="--quick leaves Postgres out",
    )


def efficiency_lines(rows: Sequence[Document]) -> Iterator[str]:
    head = "".join(f"{count:>9,}" for count in rows[0]["machines"])
    yield f"{'efficiency':10}{'sigma':>7}  {'faults':10}{head}  machines"
    for row in rows:
        shown = "".join(f"{outcome['efficiency']:>9.3f}" for outcome in row["outcomes"])
        failed = sum(outcome["failed"] for outcome in row["outcomes"])
        note = f"  {failed} partitions failed" if failed else ""
        yield f"{'':10}{row['sigma']:>7}  {row['faults']:10}{shown}{note}"


def efficiency_targets(rows: Sequence[Document]) -> Iterator[Target]:
    def lowest(machines: int) -> float | None:
        found = [
            outcome["efficiency"]
            for row in rows
            for count, outcome in zip(row["machines"], row["outcomes"], strict=True)
            if (row["faults"], count) == ("preempted", machines)
        ]
        return min(found, default=None)

    yield Target("8 machines", 0.96, lowest(8))
    yield Target("1,000 machines", 0.95, lowest(1_000))


def end_lines(ends: Sequence[Document]) -> Iterator[str]:
    yield f"{'':10}{'sigma':>7}{'hours of one machine':>22}{f'at least {WELL}':>15}{'more pay up to':>16}{'s then':>10}"
    for end in ends:
        figures = (
            f"{end['hours']:>22,g}{end['used_well']:>15,}{end['pays']:>16,}{end['seconds']:>10,.0f}"
        )
        yield f"{'':10}{end['sigma']:>7}{figures}"


SCENARIOS: Scenarios = {
    "costs": (cost_lines, cost_targets),
    "efficiency": (efficiency_lines, efficiency_targets),
    "ends": (end_lines, lambda ends: ()),
}


def main() -> None:
    parser = command_line(__doc__)
    add, quick = parser.add_argument, add_quick(parser)
    add(
        "--scenarios",
        type=names_of(SCENARIOS),
        default=list(SCENARIOS),
        help=f"of {','.join(SCENARIOS)}",
    )
    add(
        "--machines",
        type=numbers,
        default=[1, 8] if quick else [1, 8, 64, 256, 1_000],
        help="1,8,64,256,1000",
    )
    add("--partitions", type=int, default=100 if quick else 40_000, help="of a catalog (40,000)")
    add(
        "--hours",
        type=float,
        default=2.0 if quick else 1_000.0,
        help="that one machine needs for it (1,000)",
    )
    add(
        "--texts-per-second",
        type=float,
        default=700.0,
        help="of a machine, each of 47 bytes (700, a CPU)",
    )
    add(
        "--held",
        type=int,
        default=2,
        help="stretches that a machine of a Ray cluster has at a time (2)",
    )
    add(
        "--cold-seconds",
        type=float,
        default=60.0,
        help="by which a machine's first start is longer (60)",
    )
    add(
        "--replaced-seconds",
        type=float,
        default=120.0,
        help="until a lost machine is replaced (120)",
    )
    add("--model", default="hash://384" if quick else DEFAULT_MODEL, help="whose load is measured")
    add("--seed", type=int, default=0, help="of speeds and losses (0)")
    print_scenarios(measure(parser.parse_args()), SCENARIOS)


if __name__ == "__main__":
    main()
