"""The distributions that are installed here, as far as the demo catalog needs to know them: name, version, sources."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from surge_dagster.catalogs.docstrings import SourceFile, module_name

# Part of every version, changed whenever the same sources would give other rows.
_RULES = b""


@dataclass(frozen=True, slots=True)
class Distribution:
    """One installed distribution.

    Attributes:
        name: as its metadata spells it.
        version: its version and 16 hex digits of its RECORD's sha256, which lists the hash of every installed file.
        record: the RECORD itself.
        home: the folder that RECORD's paths start from.
    """

    name: str
    version: str
    record: str
    home: Path

    def sources(self) -> tuple[SourceFile, ...]:
        """Its public Python files, in the order of their paths."""
        found: list[tuple[str, SourceFile]] = []
        for row in csv.reader(self.record.splitlines()):
            module = module_name(row[0]) if row else None
            if module is not None:
                size = int(row[2]) if len(row) > 2 and row[2].isdecimal() else 0
                found.append((row[0], SourceFile(module, str(self.home / row[0]), size)))
        return tuple(source for _, source in sorted(found))


def installed_distributions(search_path: Sequence[str] | None = None) -> list[Distribution]:
    """Those in `search_path` (where Python imports from, unless told), sorted by name, once each.

    Distributions without a RECORD, such as those that belong to the operating system, are left out.
    """
    found: dict[str, Distribution] = {}
    found_on_path = metadata.distributions() if search_path is None else metadata.distributions(path=list(search_path))
    for installed in found_on_path:
        record = installed.read_text("RECORD")
        if not record or "Name" not in installed.metadata:
            continue
        name = installed.metadata["Name"]
        digest = hashlib.sha256(record.encode("utf-8") + _RULES).hexdigest()[:16]
        # The first on the path is the one that an import would find; the same name can be spelled in several ways.
        found.setdefault(
            re.sub(r"[-_.]+", "-", name).lower(),
            Distribution(name, f"{installed.version}+{digest}", record, Path(str(installed.locate_file("")))),
        )
    return sorted(found.values(), key=lambda distribution: distribution.name)
