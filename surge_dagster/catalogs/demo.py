"""The demo catalog: public docstrings of the Python packages that are installed here.

Every machine that can run this project has this text: partitions of very different sizes that
change when packages are upgraded. A partition is an installed distribution. A row is a public
class, function or method; its id is the qualified name, its text the first paragraph of the
docstring, and rows follow the files' paths and the lines in them. The project's own dependencies
give about 60,000 texts in 140 partitions of 1 to 14,600 texts.

Files are read with `ast` and never imported; those that do not parse are skipped. Python parses 6
MB of sources per second, and 260 MB are installed. So a limit gives each distribution a share in
proportion to the size of its public sources, and its files are parsed until the share is reached.

A catalog folder has one Parquet file per partition, and a file with the catalog's kind:

    <folder>/_catalog.json
    <folder>/partition=<encoded key>/part-0.parquet

A build replaces what an earlier build of the same kind wrote, and nothing else. Each file names its
source version, so that an output stays fresh after a build that wrote the same rows again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.partition import KEY_METADATA, SOURCE_VERSION_METADATA
from surge_dagster.engine.support.keys import encode_key

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
    files: Sequence[SourceFile]

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
    distributions: dict[str, Distribution] = {}
    for installed in metadata.distributions(path=[*(search_path or sys.path)]):
        record = installed.read_text("RECORD")
        if not record or "Name" not in installed.metadata:
            continue
        name = installed.metadata["Name"]
        version = f"{installed.version}+{hashlib.sha256(record.encode('utf-8')).hexdigest()[:16]}"
        files: list[SourceFile] = []
        for path in sorted(installed.files or (), key=str):
            module = module_name(str(path))
            if module is not None:
                files.append(SourceFile(module, Path(str(path.locate())), path.size or 0))
        # An import takes the first on the path.
        distributions.setdefault(name, Distribution(name, version, files))
    return sorted(distributions.values(), key=lambda distribution: distribution.name)


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


_MANIFEST = "_catalog.json"
_COLUMNS = pa.schema(
    [pa.field("id", pa.string(), nullable=False), pa.field("text", pa.string(), nullable=False)]
)


@dataclass(frozen=True, slots=True)
class CatalogSummary:
    partitions: int
    texts: int


def clear_catalog(root: Path, kind: str) -> None:
    """Create a folder for a build, or remove the partitions of an earlier build from it."""
    manifest = root / _MANIFEST
    content = json.dumps({"format": 1, "kind": kind})
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()) and _kind(manifest) != kind:
            raise ConfigError(
                f"{root} is not empty and was not built as a {kind} catalog, so nothing was "
                "changed in it. Choose another folder, or empty this one."
            )
        manifest.write_text(content)
        for partition in root.glob("partition=*"):
            shutil.rmtree(partition)
    except OSError as error:
        raise ConfigError(f"the catalog folder {root} can't be used: {error}") from error


def write_partition(
    root: Path, key: str, version: str, row_groups: Iterable[tuple[pa.Array, pa.Array]]
) -> None:
    """Write a partition's file; each pair of ids and texts becomes a row group."""
    path = root / f"partition={encode_key(key)}" / "part-0.parquet"
    schema = _COLUMNS.with_metadata(
        {KEY_METADATA: key.encode(), SOURCE_VERSION_METADATA: version.encode()}
    )
    try:
        path.parent.mkdir()
        # Ids and texts seldom repeat, so that dictionaries would only cost time.
        with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
            for ids, texts in row_groups:
                writer.write_batch(pa.record_batch([ids, texts], schema=schema))
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error}") from error


def _kind(manifest: Path) -> str | None:
    try:
        return json.loads(manifest.read_text())["kind"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
