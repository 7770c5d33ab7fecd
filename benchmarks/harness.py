"""What all benchmarks share: command lines, processes of their own, facts of the machine, aims
beside measurements."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.devices import usable_cores

Document = dict[str, Any]

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")


@dataclass(frozen=True, slots=True)
class Target:
    """An aim. `measured` is None where the run did not measure it; `note` says why."""

    name: str
    target: float
    measured: float | None
    at_least: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def as_dict(self) -> Document:
        return asdict(self) | {"met": self.met}


def at_most(name: str, target: float, measured: float | None, note: str = "") -> Target:
    """An aim that is met by values up to `target`."""
    return Target(name, target, measured, at_least=False, note=note)


# Each scenario's table and aims, made from its part of the document.
Scenarios = Mapping[str, tuple[Callable[..., Iterable[str]], Callable[..., Iterable[Target]]]]


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_quick(parser: argparse.ArgumentParser) -> bool:
    """Add `--quick`; gives whether it was requested, because other defaults depend on it."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes: shows that everything runs, measures nothing",
    )
    return "--quick" in sys.argv


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The argparse type of a comma-separated list of known names."""
    choices = tuple(known)

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)}: choose from {', '.join(choices)}"
            )
        return names

    return parse


def numbers(text: str) -> list[float]:
    """The argparse type of a comma-separated list of numbers."""
    return [float(number) for number in text.split(",")]


def seconds_of(work: Callable[[], object]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def in_own_process(module: str, *words: object, **options: Any) -> Document:
    """Run a module as a program; gives the document in the last line of its output."""
    command = [sys.executable, "-m", module, *map(str, words)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    return json.loads(finished.stdout.splitlines()[-1])


def say(text: str) -> None:
    """Print progress to standard error; the last line of standard output is the document."""
    print(text, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class when it has none."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def start_document(name: str, arguments: argparse.Namespace, libraries: Iterable[str]) -> Document:
    """What the results depend on beside the code: machine, library versions, settings."""
    return {
        "benchmark": name,
        "machine": _machine(),
        "versions": _versions(libraries),
        "settings": {key: str(value) for key, value in vars(arguments).items()},
    }


def print_scenarios(document: Document, scenarios: Scenarios) -> None:
    """Print the tables and aims of the scenarios that are in the document, and the document."""
    lines, aims = list[str](), list[Target]()
    for name, (lines_of, targets_of) in scenarios.items():
        if name in document:
            lines += ["", *lines_of(document[name])]
            aims += targets_of(document[name])
    print_document(document, lines, aims)


def print_document(document: Document, lines: Iterable[str], aims: Iterable[Target]) -> None:
    """Print the table, the aims and, as the last line, the document."""
    machine, aims = document["machine"], list(aims)
    load = f"load average {machine['load_average']:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(f"{machine['processor']}, {machine['cores']} cores, {load}")
    for line in (*lines, *aim_lines(aims)):
        print(line)
    print(json.dumps(document | {"targets": [aim.as_dict() for aim in aims]}))


def aim_lines(aims: Iterable[Target]) -> Iterator[str]:
    """A table of the aims with what was measured."""
    yield from ("", f"{'aim':66}{'target':>12}{'measured':>12}")
    for aim in aims:
        sign = ">=" if aim.at_least else "<="
        measured = "-" if aim.measured is None else f"{aim.measured:,.6g}"
        verdict = {
            True: "met",
            False: "missed",
            None: f"not measured here: {aim.note or 'not requested'}",
        }[aim.met]
        yield f"{aim.name:66}{f'{sign} {aim.target:,g}':>12}{measured:>12}  {verdict}"


def cpu_instructions() -> set[str]:
    """Instruction sets of the processor, by the kernel's names."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        flag
        for line in lines
        if line.startswith(("flags", "Features"))
        for flag in line.split(":", 1)[1].split()
    }


def _machine() -> Document:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(models, "unknown"),
        "cores": usable_cores(),
        "instructions": [name for name in _INSTRUCTIONS if name in cpu_instructions()],
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def _versions(names: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
