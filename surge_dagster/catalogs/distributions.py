"""The distributions that are installed here, as far as the demo catalog needs to know them: name, version, sources."""

from __future__ import annotations

import csv
import hashlib
import re
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


def installed_distributions() -> list[Distribution]:
    """All of them, sorted by name, once each; those without a RECORD, such as a system's own packages, are left out."""
    found: dict[str, Distribution] = {}
    for installed in metadata.distributions():
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
