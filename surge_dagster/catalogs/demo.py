"""The demo catalog: public docstrings of the Python packages that are installed here.

Every machine that can run this project has this text: partitions of very different sizes that
change when packages are upgraded. A partition is an installed distribution. A row is a public
class, function or method; its id is the qualified name, its text the first paragraph of the
docstring, and rows follow the files' paths and the lines in them. The project's own dependencies
give about 60,000 texts in 140 partitions of 1 to 14,600 texts.

Files are read with `ast` and never imported; those that do not parse are skipped. Python parses 6
MB of sources per second, and 260 MB are installed. So a limit gives each distribution a share in
proportion to the size of its public sources, and its files are parsed until the share is reached.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pyarrow as pa

from surge_dagster.catalogs.folder import CatalogSummary, clear_catalog, write_partition
from surge_dagster.engine.errors import ConfigError

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# A definition may also stand under `if`, `try`, `with` or a loop.
_BLOCKS = ("body", "handlers", "orelse", "finalbody")
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A public module, its path, and its size in bytes (0 if the RECORD does not have it)."""

    module: str
    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution; its version ends in 16 hex digits of its RECORD's SHA-256."""

    name: str
    version: str
    files: tuple[SourceFile, ...]

    @property
    def size(self) -> int:
        """Bytes of its public modules."""
        return sum(file.size for file in self.files)


def build_demo_catalog(
    out: Path,
    *,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    search_path: Sequence[str] | None = None,
) -> CatalogSummary:
    """Build the catalog of the installed packages; an earlier build in the folder is replaced.

    Args:
        limit: number of texts, about: each distribution gives at least one. None takes all.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"the limit of a demo catalog must be at least 1 text, not {limit}.")
    clear_catalog(out, "demo")
    installed = _installed(search_path)
    total = max(1, sum(distribution.size for distribution in installed))
    partitions = 0
    texts = 0
    done = 0
    for distribution in installed:
        share = None
        version = distribution.version
        if limit is not None:
            share = max(1, limit * distribution.size // total)
            version += f"+{share}"
        rows = extract(distribution.files, share)
        if rows:
            ids = pa.array(list(rows), pa.string())
            docstrings = pa.array(list(rows.values()), pa.string())
            write_partition(out, distribution.name, version, [(ids, docstrings)])
            partitions += 1
            texts += len(rows)

        done += distribution.size
        if progress is not None:
            progress(done, total)
    return CatalogSummary(partitions, texts)


def module_name(path: str) -> str | None:
    """Return the dotted name of a file in a wheel's RECORD, None if it is not a public module."""
    if not path.endswith(".py"):
        return None
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    if parts and all(map(_is_public, parts)):
        return ".".join(parts)
    return None


def extract(files: Sequence[SourceFile], limit: int | None = None) -> dict[str, str]:
    """Return texts by qualified name, in the files' order.

    With a limit, files are parsed in an order that is scattered over the package and the same on
    every machine, until there are enough texts. When two texts have one name, the first is kept.
    """
    if limit is not None:
        files = sorted(files, key=lambda file: zlib.crc32(file.module.encode()))
    texts: dict[str, str] = {}
    for file in files:
        for name, text in _texts(file).items():
            if len(texts) == limit:
                return texts
            texts.setdefault(name, text)
    return texts


def extract_source(module: str, source: bytes) -> dict[str, str]:
    """Return the texts of one module by name; of several definitions with one name, the first with
    a docstring."""
    texts: dict[str, str] = {}
    for name, node in _public_definitions(ast.parse(source).body, module):
        text = first_paragraph(ast.get_docstring(node) or "")
        if text:
            texts.setdefault(name, text)
    return texts


def first_paragraph(docstring: str) -> str:
    """Return the first paragraph on one line; empty if there is none."""
    paragraph = " ".join(_PARAGRAPH_END.split(docstring.strip(), maxsplit=1)[0].split())
    # A literal may hold half a surrogate pair, which no file can store.
    return paragraph.encode("utf-8", "replace").decode("utf-8")


def _installed(search_path: Sequence[str] | None) -> list[Distribution]:
    """Return the distributions in `search_path`, sorted by name, without the operating system's,
    which have no RECORD."""
    if search_path is None:
        installations = metadata.distributions()
    else:
        installations = metadata.distributions(path=[*search_path])

    distributions: dict[str, Distribution] = {}
    for installed in installations:
        record = installed.read_text("RECORD")
        if not record or "Name" not in installed.metadata:
            continue
        name = installed.metadata["Name"]
        version = f"{installed.version}+{hashlib.sha256(record.encode('utf-8')).hexdigest()[:16]}"
        files = _files(record, Path(str(installed.locate_file(""))))
        # An import takes the first on the path.
        distributions.setdefault(name, Distribution(name, version, files))
    return sorted(distributions.values(), key=lambda distribution: distribution.name)


def _files(record: str, folder: Path) -> tuple[SourceFile, ...]:
    """Return the public modules of a RECORD: a CSV table of paths, hashes and sizes."""
    files: list[SourceFile] = []
    for row in sorted(row for row in csv.reader(record.splitlines()) if row):
        module = module_name(row[0])
        if module is not None:
            size = int(row[2]) if len(row) > 2 and row[2].isdecimal() else 0
            files.append(SourceFile(module, folder / row[0], size))
    return tuple(files)


def _texts(file: SourceFile) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the packages' sources
        try:
            return extract_source(file.module, file.path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return {}


def _public_definitions(body: Iterable[ast.AST], prefix: str) -> Iterator[tuple[str, _Definition]]:
    for node in body:
        if not isinstance(node, _Definition):
            for block in _BLOCKS:
                yield from _public_definitions(getattr(node, block, ()), prefix)
        elif _is_public(node.name):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _public_definitions(node.body, name)


def _is_public(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_")
