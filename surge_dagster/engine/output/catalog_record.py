"""The catalog whose embeddings a space holds, as its `space.json` records it.

Partitions of two catalogs may have equal keys, and each catalog would replace the other's files. So
the first run of a space records its catalog there, and a run over another one is refused. A catalog
is recognized by its name if it was given one, else by its place. A place may be reached through
another path, and a catalog may be moved together with its output: both are the same catalog still.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.formats import SUFFIX
from surge_dagster.engine.sources.listing import HIDDEN, split_pattern
from surge_dagster.engine.store.store import Store

_PARTITION_BY = "partition_by"


@dataclass(frozen=True, slots=True)
class CatalogRecord:
    """A catalog, and how its rows are read.

    Attributes:
        place: its URL, or its absolute local path.
        name: as its owner named it; None if the place identifies it.
        beside_output: its local path, relative to the output; None if one of them is not local.
        settings: its settings that differ from their defaults, as JSON has them.
    """

    place: str
    name: str | None = None
    beside_output: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        return self.name or self.place

    @property
    def is_local(self) -> bool:
        return self.place.startswith("/")

    def for_output(self, store: Store) -> CatalogRecord:
        """Return the record as this output keeps it."""
        if not self.is_local or store.is_remote:
            return replace(self, beside_output=None)
        return replace(self, beside_output=os.path.relpath(self.place, store.url))

    def selected_as(self, recorded: CatalogRecord) -> CatalogRecord:
        """Return this catalog with the recorded settings, but for those of its partitions."""
        settings = dict(recorded.settings)
        settings.pop(_PARTITION_BY, None)
        if _PARTITION_BY in self.settings:
            settings[_PARTITION_BY] = self.settings[_PARTITION_BY]
        return replace(self, settings=settings)

    def is_same(self, recorded: CatalogRecord) -> bool:
        """Return whether this is the recorded catalog; one that was moved together with its output
        is gone from the recorded place."""
        if self.name and recorded.name:
            return self.name == recorded.name
        if self.place == recorded.place:
            return True
        if not (self.is_local and recorded.is_local):
            return False
        is_beside = self.beside_output is not None and self.beside_output == recorded.beside_output
        is_moved = is_beside and not Path(recorded.place).exists()
        return is_moved or os.path.realpath(self.place) == os.path.realpath(recorded.place)

    def require_same(
        self, recorded: CatalogRecord | None, space: str, store: Store
    ) -> CatalogRecord:
        """Return what is to be recorded now; raises `ConfigError` if the space holds another
        catalog, or this one in other partitions."""
        if recorded is None:
            return self
        if self.is_same(recorded):
            self._require_same_partitions(recorded, space, store)
            return replace(self, name=self.name or recorded.name)
        if self.name == recorded.place:  # it was moved: its name stands for the place where it was
            self._require_same_partitions(recorded, space, store)
            return replace(self, name=recorded.name)
        own = f"{self.name!r} at {self.place!r}" if self.name else repr(self.place)
        raise ConfigError(
            f"the space {space} in {store.url!r} holds embeddings of the catalog "
            f"{recorded.shown!r}, and this run reads {own}. Two catalogs would replace each "
            "other's files: give each its own output. If it is the same one, moved or reached "
            f"another way, say so once with the setting catalog_name: {recorded.shown}"
        )

    def _require_same_partitions(self, recorded: CatalogRecord, space: str, store: Store) -> None:
        now = self.settings.get(_PARTITION_BY)
        was = recorded.settings.get(_PARTITION_BY)
        if now == was or not any(file.name.endswith(SUFFIX) for file in store.list(space)):
            return
        raise ConfigError(
            f"the space {space} in {store.url!r} holds the catalog {self.shown!r} with "
            f"partition_by {was or 'unset'}, and this run has {now or 'unset'}: readers would get "
            "its rows twice. Set it as it was, or give the run an output of its own."
        )

    def require_apart(self, store: Store) -> None:
        """Raise `ConfigError` for an output whose files would be rows of the catalog."""
        place = os.path.realpath(self.place) if self.is_local else self.place.rstrip("/")
        output = store.url if store.is_remote else os.path.realpath(store.url)
        base = place
        pattern = None
        if not (self.is_local and Path(place).exists()):
            base, pattern = split_pattern(place)
        base = base.rstrip("/")
        if output != base and not output.startswith(f"{base}/"):
            return
        inside = PurePosixPath(output).relative_to(base).parts
        is_read = not any(part.startswith(HIDDEN) for part in inside)
        if pattern is not None:
            name = "/".join((*inside, "space", f"key{SUFFIX}"))
            is_read = is_read and pattern.regex.fullmatch(name) is not None
        if is_read:
            raise ConfigError(
                f"the output {store.url!r} lies inside the source {self.place!r}, where its files "
                "would be read as rows. Give an output outside it."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the value of `catalog` in space.json."""
        document: dict[str, Any] = {"place": self.place, "settings": dict(self.settings)}
        if self.name:
            document["name"] = self.name
        if self.beside_output:
            document["beside_output"] = self.beside_output
        return document


def catalog_from_json(document: Any) -> CatalogRecord:
    """Return the record in a space.json; raises `TypeError` or `KeyError` for anything else."""
    record = CatalogRecord(
        document["place"],
        document.get("name"),
        document.get("beside_output"),
        document.get("settings", {}),
    )
    texts = (record.place, record.name or "", record.beside_output or "")
    if not all(isinstance(text, str) for text in texts) or not isinstance(record.settings, dict):
        raise TypeError("its catalog has values of another type")
    return record
