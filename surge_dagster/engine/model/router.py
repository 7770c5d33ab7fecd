"""The routes of a Router module: their modules, and which route documents and queries take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import read_document
from surge_dagster.engine.model.prompts import Task

# `Asym` is what older versions of sentence-transformers call it.
ROUTER_KINDS = ("Router", "Asym")
_FILES = ("router_config.json", "config.json")


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a Router: type and folder of each module by route, and the route by task and
    modality as text."""

    listing: Path
    modules: dict[str, list[tuple[str, Path]]]
    mappings: dict[str, str]

    def of(self, task: Task) -> str:
        """The name of the route that texts of a task take, in sentence-transformers' order."""
        keys = ((task, "text"), (task, None), (None, "text"), (None, None))
        mapped = [self.mappings.get(str(key)) for key in keys]
        for route in (*mapped, task):
            if route is not None and route in self.modules:
                return route
        raise ConfigError(
            f"{self.listing} has no route for texts of the task {task!r}, which "
            f"sentence-transformers' encode_{task} needs; its routes: {', '.join(self.modules)}; "
            "use another model"
        )


def read_routes(folder: Path) -> Routes:
    """The routes of the Router in a folder."""
    found = [folder / name for name in _FILES if (folder / name).is_file()]
    listing = found[0] if found else folder / _FILES[0]
    document = read_document(listing) or {}
    try:
        types = document["types"]
        modules = {
            str(route): [(str(types[name]), folder / str(name)) for name in names]
            for route, names in document["structure"].items()
        }
        mappings = dict((document.get("parameters") or {}).get("route_mappings") or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{listing} cannot be read ({error!r}); download the model again"
        ) from error
    return Routes(listing, modules, mappings)
