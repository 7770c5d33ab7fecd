"""What all benchmarks share: options, sides that take turns, processes, facts of the machine, and
aims next to measurements."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil

from surge_dagster.engine.encoder.devices import usable_cores

Document = dict[str, Any]
Result = TypeVar("Result")

_INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "bf16",
)
_START_SECONDS = 120
_STOP_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Target:
    """An aim.

    Args:
        measured: None if the run did not measure it; `note` says why.
    """

    name: str
    target: float
    measured: float | None
    at_least: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        if self.at_least:
            return self.measured >= self.target
        return self.measured <= self.target

    def as_dict(self) -> Document:
        return asdict(self) | {"met": self.met}


def at_most(name: str, target: float, measured: float | None, note: str = "") -> Target:
    """Return an aim that is met by values up to `target`."""
    return Target(name, target, measured, at_least=False, note=note)


class Options(argparse.ArgumentParser):
    """The command line of a benchmark. `--quick` makes every size tiny: it shows that everything
    runs, and measures nothing."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
        self._is_quick = "--quick" in sys.argv

    def add_size(self, name: str, full: float, quick: float, meaning: str = "") -> None:
        """Add an option whose default depends on `--quick`."""
        self.add_argument(
            name,
            type=type(full),
            default=quick if self._is_quick else full,
            help=f"{meaning} ({full:,})",
        )

    def add_names(
        self,
        name: str,
        known: Iterable[str],
        default: Iterable[str] = (),
        quick: Iterable[str] = (),
    ) -> None:
        """Add an option that takes some of the known names, separated by commas.

        Args:
            default: all if it is empty.
            quick: with `--quick`; the default if it is empty.
        """
        choices = tuple(known)

        def parse(text: str) -> list[str]:
            names = text.split(",")
            unknown = set(names).difference(choices)
            if unknown:
                raise argparse.ArgumentTypeError(f"{unknown}: choose from {', '.join(choices)}")
            return names

        names = list(default or choices)
        if quick and self._is_quick:
            names = list(quick)
        self.add_argument(name, type=parse, default=names, help=f"of {','.join(choices)}")


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def in_turns(sides: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Call the sides one after the other, every second round backwards; return their results."""
    results: dict[str, list[Result]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        say(f"  round {number + 1} of {rounds}")
        for name in names:
            results[name].append(sides[name]())
        names.reverse()
    return results


def median_ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Return the median of the ratios of the rounds."""
    return median(our / their for our, their in zip(ours, theirs, strict=True))


def in_own_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a new process and return its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(work, *arguments).result()


@contextlib.contextmanager
def temporary_folder(parent: Path | str | None = None) -> Iterator[Path]:
    """Yield a folder that is removed at the end."""
    with tempfile.TemporaryDirectory(
        prefix="surge-bench-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


@contextlib.contextmanager
def serving(
    command: Sequence[str], ready_path: str, **options: Any
) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server, and stop it with its children at the end.

    Args:
        command: without the port, which becomes its last word.
        ready_path: is answered as soon as the server is ready.
        options: of the process.

    Yields:
        Its URL and its process.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*command, str(port)], stdout=sys.stderr, **options) as process:
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _answers(url + ready_path):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command} is not ready; exit code {process.returncode}")
                time.sleep(0.1)
            yield url, psutil.Process(process.pid)
        finally:
            _stop(process.pid)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except OSError:
        return False


def _stop(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        family = [server, *server.children(recursive=True)]
        server.terminate()
        for process in psutil.wait_procs(family, _STOP_SECONDS)[1]:
            process.kill()


def say(text: str) -> None:
    """Print progress to standard error; the last line of standard output is the document."""
    print(text, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def start_document(name: str, arguments: argparse.Namespace, libraries: Iterable[str]) -> Document:
    """Return what results depend on in addition to the code: machine, versions, settings."""
    return {
        "benchmark": name,
        "machine": _machine(),
        "versions": versions_of(libraries),
        "settings": {key: str(value) for key, value in vars(arguments).items()},
    }


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of those that are installed."""
    versions = {}
    for library in libraries:
        with contextlib.suppress(PackageNotFoundError):
            versions[library] = version(library)
    return versions


def print_document(
    document: Document,
    lines: Callable[[Document], Iterable[str]],
    targets: Callable[[Document], Iterable[Target]],
) -> None:
    """Print the table, the aims and, as the last line, the document."""
    machine = document["machine"]
    aims = list(targets(document))
    load = f"load average {machine['load_average']:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(f"{machine['processor']}, {machine['cores']} cores, {load}")
    print(*lines(document), *aim_lines(aims), sep="\n")
    print(json.dumps(document | {"targets": [aim.as_dict() for aim in aims]}))


def aim_lines(aims: Iterable[Target]) -> Iterator[str]:
    """Yield a table of the aims with what was measured."""
    yield from ("", f"{'aim':66}{'target':>12}{'measured':>12}")
    for aim in aims:
        sign = ">=" if aim.at_least else "<="
        measured = "-" if aim.measured is None else f"{aim.measured:,.6g}"
        missing = f"not measured here: {aim.note or 'not requested'}"
        verdict = {True: "met", False: "missed", None: missing}[aim.met]
        yield f"{aim.name:66}{f'{sign} {aim.target:,g}':>12}{measured:>12}  {verdict}"


def cpu_instructions() -> set[str]:
    """Return the instruction sets of the processor, by the kernel's names."""
    flags = {*_cpu_facts("flags"), *_cpu_facts("Features")}
    return set(" ".join(flags).split())


def _cpu_facts(name: str) -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith(name)]


def _machine() -> Document:
    available = cpu_instructions()
    return {
        "processor": next(iter(_cpu_facts("model name")), "unknown"),
        "cores": usable_cores(),
        "instructions": [name for name in _INSTRUCTIONS if name in available],
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }
