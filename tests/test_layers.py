"""The imports of every product module follow the order of the rooms: downwards only, and never in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "surge_dagster"
FOLDERS = {ROOT / PACKAGE: PACKAGE, ROOT / "assets": f"{PACKAGE}.assets", ROOT / "resources": f"{PACKAGE}.resources"}

# Top to bottom. A room (a package or a module, without the leading `surge_dagster.`) may import itself, the rooms of
# its own line and those of the lines below it.
LAYERS = (
    "__main__",
    "component commands demo",
    "definitions terminal catalogs",
    "automation",
    "assets",
    "orchestration event_storage",
    "resources",
    "config",
    "consumers",
    "engine.derived engine.feed engine.plan engine.readers engine.tables engine.verify",
    "engine.run",
    "engine.output",
    "engine.encoder engine.sources",
    "engine.files engine.model",
    "engine.store",
    "engine.support",
    "engine.errors version",
)
HOUSES = {PACKAGE, "engine"}
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
