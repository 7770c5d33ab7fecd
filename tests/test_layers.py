"""The order of the rooms and their size: imports go downwards only, and the core stands without its satellites."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.small_catalogs import assert_embedded, numbered_rows, write_catalog

ROOT = Path(__file__).parent.parent
PACKAGE = "surge_dagster"
FOLDERS = {ROOT / PACKAGE: PACKAGE, ROOT / "assets": f"{PACKAGE}.assets", ROOT / "resources": f"{PACKAGE}.resources"}

# Top to bottom. A room (a package or a module, without the leading `surge_dagster.`) may import itself, the rooms of
# its own line and those of the lines below it.
LAYERS = (
    "__main__",
    "component commands demo",
    "definitions local_run",
    "terminal catalogs",
    "automation",
    "assets",
    "orchestration event_storage",
    "resources service cluster",
    "config",
    "consumers",
    "engine.derived engine.feed engine.inference engine.plan engine.readers engine.remote engine.tables engine.verify",
    "engine.run",
    "engine.output",
    "engine.encoder engine.sources",
    "engine.files engine.model",
    "engine.store",
    "engine.support",
    "engine.errors version",
)
HOUSES = {PACKAGE, "engine"}
CORE = ("run", "output", "encoder", "sources", "files", "model", "store", "support", "errors")
SATELLITES = ("derived", "feed", "inference", "plan", "readers", "remote", "tables", "verify")
# Lines of Python at most, comments and blank ones included. A room that grows past its budget needs a reason.
BUDGETS: dict[str, int] = {
    "__main__": 11,
    "component": 100,
    "commands": 910,
    "demo": 180,
    "definitions": 150,
    "local_run": 276,
    "terminal": 120,
    "catalogs": 420,
    "automation": 450,
    "assets": 1_160,
    "orchestration": 3_659,
    "event_storage": 90,
    "resources": 450,
    "service": 3_982,
    "cluster": 1_086,
    "config": 800,
    "consumers": 930,
    "engine.derived": 710,
    "engine.feed": 740,
    "engine.inference": 1_522,
    "engine.plan": 1_300,
    "engine.readers": 625,
    "engine.remote": 500,
    "engine.tables": 1_550,
    "engine.verify": 630,
    "engine.run": 4_105,
    "engine.output": 770,
    "engine.encoder": 3_712,
    "engine.sources": 2_345,
    "engine.files": 1_045,
    "engine.model": 1_135,
    "engine.store": 1_600,
    "engine.support": 1_025,
    "engine.errors": 80,
    "version": 8,
}
RANKS = {room: rank for rank, line in enumerate(LAYERS) for room in line.split()}


@cache
def imports() -> dict[str, set[str]]:
    """What each product module imports of the product, also inside functions and for type checkers.

    Names have no leading `surge_dagster.`. The packages that hold rooms, `surge_dagster` and `engine`, are left out.
    """
    files = {_module(folder, name, path): path for folder, name in FOLDERS.items() for path in folder.rglob("*.py")}
    found = {module: set(_imported(path, set(files))) - {module} for module, path in files.items()}
    short = {_short(module): {_short(name) for name in names} for module, names in found.items()}
    return {module: {name for name in names if room(name)} for module, names in short.items() if module not in HOUSES}


def _module(folder: Path, name: str, path: Path) -> str:
    parts = [name, *path.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _short(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.")


def _imported(path: Path, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            yield from names or {node.module} & modules


def room(module: str) -> str:
    """The room that a module belongs to; empty when it belongs to none."""
    while module and module not in RANKS:
        module = module.rpartition(".")[0]
    return module


def test_every_module_belongs_to_a_room() -> None:
    assert [module for module in imports() if not room(module)] == [], "add the module's room to LAYERS"


def test_no_module_imports_a_room_above_its_own() -> None:
    upward = [
        f"{module} imports {imported}"
        for module, found in imports().items()
        for imported in found
        if RANKS[room(imported)] < RANKS[room(module)]
    ]
    assert upward == []


def test_no_modules_and_no_rooms_import_each_other_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    modules: dict[str, set[str]] = {}
    for module, found in imports().items():
        modules[module] = found
        rooms.setdefault(room(module), set()).update({room(imported) for imported in found} - {room(module)})
    for graph in (modules, rooms):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            raise AssertionError(f"imported in a circle: {' -> '.join(error.args[1])}") from None


def lines_of(*places: Path) -> int:
    """Lines of Python in files and in folders with all that lies below them."""
    files = [path for place in places for path in ([place] if place.is_file() else place.rglob("*.py"))]
    return sum(path.read_bytes().count(b"\n") for path in files)


def place_of(room: str) -> Path:
    """The folder or the file of a room."""
    above, _, name = room.rpartition(".")
    folder = ROOT / room if room in ("assets", "resources") else ROOT / PACKAGE / above.replace(".", "/") / name
    return folder if folder.is_dir() else folder.with_suffix(".py")


def test_core_imports_no_satellite() -> None:
    """What the order says too: a satellite in the line of a core room would still be found here."""
    core, satellites = ({f"engine.{name}" for name in names} for names in (CORE, SATELLITES))
    assert core | satellites == {name for name in RANKS if name.startswith("engine.")}
    found = [
        f"{module} imports {imported}"
        for module, names in imports().items()
        for imported in names
        if room(module) in core and room(imported) in satellites
    ]
    assert found == []


@pytest.mark.parametrize("room_name", sorted(RANKS))
def test_room_keeps_to_its_budget_of_lines(room_name: str) -> None:
    assert lines_of(place_of(room_name)) <= BUDGETS[room_name]


def test_core_product_and_tests_keep_to_their_budgets() -> None:
    core = lines_of(*(place_of(f"engine.{name}") for name in CORE))
    product = lines_of(ROOT / PACKAGE, ROOT / "assets", ROOT / "resources")
    assert core <= 16_000
    assert product <= 38_500
    assert lines_of(ROOT / "tests") <= 48_000
    assert lines_of(ROOT / "benchmarks") <= 7_891  # 1,250 of them simulate fleets


RUN_OF_THE_CORE = """
import sys
from pathlib import Path

import surge_dagster
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.sources import open_folders
from surge_dagster.engine.store import open_store

print(surge_dagster.__file__)
with EncoderPool(EncodingSpec("hash://16"), devices="cpu") as pool:
    for _ in range(2):
        run = EmbeddingRun(open_folders(sys.argv[1]), open_store(sys.argv[2]), pool)
        print(sorted((receipt.key, receipt.rows) for receipt in run), run.report.partitions_skipped)
"""


@pytest.mark.processes
def test_core_embeds_a_catalog_with_every_satellite_deleted(tmp_path: Path) -> None:
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tmp_path / PACKAGE).iterdir():
        if path.name not in ("engine", "__init__.py", "version.py"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in SATELLITES:
        shutil.rmtree(tmp_path / PACKAGE / "engine" / name)
    rows = {"a": numbered_rows("a", 3), "b": numbered_rows("b", 5)}
    write_catalog(tmp_path / "catalog", rows)
    ended = subprocess.run(
        [sys.executable, "-c", RUN_OF_THE_CORE, tmp_path / "catalog", tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    where, first, second = ended.stdout.splitlines()
    assert where.startswith(str(tmp_path))
    assert (first, second) == ("[('a', 3), ('b', 5)] 0", "[] 2")
    [space] = (tmp_path / "out").glob("hash-*")
    for key, expected in rows.items():
        assert_embedded(tmp_path / "out", space.name, key, expected)
