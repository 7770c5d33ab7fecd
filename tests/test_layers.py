"""The order of the rooms: imports go downwards only, and the core stands without its satellites."""

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
FOLDERS = {
    ROOT / PACKAGE: PACKAGE,
    ROOT / "assets": f"{PACKAGE}.assets",
    ROOT / "resources": f"{PACKAGE}.resources",
}

# Top to bottom. A room (a package or a module, without the leading `surge_dagster.`) may import
# itself, the rooms of its own line and those of the lines below it.
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
    "engine.compare engine.derived engine.feed engine.inference engine.plan engine.readers"
    " engine.tables engine.verify",
    "engine.run",
    "engine.chunks",
    "engine.output",
    "engine.encoder engine.sources",
    "engine.files engine.model",
    "engine.endpoint",
    "engine.store",
    "engine.support",
    "engine.errors version",
)
HOUSES = {PACKAGE, "engine"}
SATELLITES = (
    "chunks",
    "compare",
    "derived",
    "feed",
    "inference",
    "plan",
    "readers",
    "tables",
    "verify",
)
RANKS = {room: rank for rank, line in enumerate(LAYERS) for room in line.split()}


@cache
def imports() -> dict[str, set[str]]:
    """What each product module imports of the product, also inside functions and for type checkers.

    Names have no leading `surge_dagster.`. The packages that hold rooms, `surge_dagster` and
    `engine`, are left out.
    """
    files: dict[str, Path] = {}
    for folder, name in FOLDERS.items():
        for path in folder.rglob("*.py"):
            files[_module(folder, name, path)] = path
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        if _short(module) not in HOUSES:
            names = set(map(_short, _imported(path, set(files)))) - {_short(module)}
            found[_short(module)] = set(filter(room, names))
    return found


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
    assert [module for module in imports() if not room(module)] == [], (
        "add the module's room to LAYERS"
    )


def test_no_module_imports_a_room_above_its_own() -> None:
    for module, found in imports().items():
        for imported in found:
            assert RANKS[room(imported)] >= RANKS[room(module)], f"{module} imports {imported}"


def test_no_modules_and_no_rooms_import_each_other_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for module, found in imports().items():
        rooms.setdefault(room(module), set()).update(set(map(room, found)) - {room(module)})
    for graph in (imports(), rooms):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            raise AssertionError(f"imported in a circle: {' -> '.join(error.args[1])}") from None


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
    shutil.copytree(
        ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__")
    )
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
    assert first == "[('a', 3), ('b', 5)] 0"
    assert second == "[] 2"

    [space] = (tmp_path / "out").glob("hash-*")
    for key, expected in rows.items():
        assert_embedded(tmp_path / "out", space.name, key, expected)
