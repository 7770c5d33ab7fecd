"""What all benchmarks share: command line types, progress lines, facts of the machine, and aims beside measurements."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
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


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The argparse type of a comma-separated list of known names."""
    choices = tuple(known)

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(choices)}")
        return names

    return parse


def say(text: str) -> None:
    """Print progress to standard error; the last line of standard output is the document."""
    print(text, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class when it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def start_document(name: str, arguments: argparse.Namespace, libraries: Iterable[str]) -> Document:
    """What the results depend on beside the code: machine, library versions, settings."""
    return {
        "benchmark": name,
        "machine": _machine(),
        "versions": _versions(libraries),
        "settings": {key: str(value) for key, value in vars(arguments).items()},
    }


def print_document(document: Document, lines: Iterable[str], aims: list[Target]) -> None:
    """Print the table, the aims and, as the last line, the document."""
    machine = document["machine"]
    load = f"load average {machine['load_average']:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(f"{machine['processor']}, {machine['cores']} cores, {load}")
    for line in (*lines, *aim_lines(aims)):
        print(line)
    print(json.dumps(document | {"targets": [aim.as_dict() for aim in aims]}))


# Each scenario's table and aims, made from its part of the document.
Scenarios = Mapping[str, tuple[Callable[..., Iterable[str]], Callable[..., Iterable[Target]]]]


def scenario_lines(scenarios: Scenarios, document: Document) -> list[str]:
    """The tables of the scenarios that are in the document."""
    return [line for name, (lines, _) in scenarios.items() if name in document for line in lines(document[name])]


def scenario_targets(scenarios: Scenarios, document: Document) -> list[Target]:
    """The aims of the scenarios that are in the document."""
    return [aim for name, (_, aims) in scenarios.items() if name in document for aim in aims(document[name])]


def aim_lines(aims: Iterable[Target]) -> Iterator[str]:
    """A table of the aims with what was measured."""
    yield from ("", f"{'aim':66}{'target':>12}{'measured':>12}")
    for aim in aims:
        sign = ">=" if aim.at_least else "<="
        measured = "-" if aim.measured is None else f"{aim.measured:,.6g}"
        verdict = {True: "met", False: "missed", None: f"not measured here: {aim.note or 'not requested'}"}[aim.met]
        yield f"{aim.name:66}{f'{sign} {aim.target:,g}':>12}{measured:>12}  {verdict}"


def cpu_instructions() -> set[str]:
    """Instruction sets of the processor, by the kernel's names."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":", 1)[1].split()}


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
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
