"""Public docstrings of Python source files, read with `ast` and never imported.

A row is one public class, function or method: its qualified name, and the first paragraph of its docstring on one line,
without the signature that some projects put in front. Files that do not parse are skipped.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

Row = tuple[str, str]
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_PARAGRAPH_END = re.compile(r"\n[ \t]*\n")
_BLANKS = re.compile(r"\s+")
_SIGNATURE_START = re.compile(r"\s*(?:[\w, ]+=\s*)?(?:\w+\.)*(\w+)\(")
_SIGNATURE_REST = re.compile(r"[ \t]*(?:->[^\n]*|:)?(?:\n|$)")
_DOCSTRING_START = re.compile(rb":\s+[rRuU]?(?:\"\"\"|''')")
# A definition may also stand under `if`, `try`, `with` or a loop.
_BLOCKS = ("body", "handlers", "orelse", "finalbody")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A public module, its path, and its size in bytes (0 when it is not known)."""

    module: str
    path: Path
    size: int


def module_name(path: str) -> str | None:
    """The dotted name of a file in a wheel's RECORD, None when the file is private or no module."""
    if not path.endswith(".py"):
        return None
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) if parts and all(map(_is_public, parts)) else None


def count_docstrings(files: Iterable[SourceFile]) -> int:
    """A quick upper estimate of the files' rows: 1.0 to 2.8 times as many in most packages."""
    return sum(map(_count, files))


def extract(files: Sequence[SourceFile], limit: int | None = None) -> list[Row]:
    """The rows of several files, in the files' order; files that cannot be read or parsed give none.

    With a limit, files are parsed in an order that is scattered over the package, until there are enough rows. When two
    rows have one id, the first is kept.
    """
    found: dict[int, list[Row]] = {}
    missing = limit
    for index in range(len(files)) if limit is None else _scattered(files, limit):
        if missing == 0:
            break
        found[index] = _rows(files[index])[:missing]
        missing = None if missing is None else missing - len(found[index])
    merged: dict[str, str] = {}
    for index in sorted(found):
        for row_id, text in found[index]:
            merged.setdefault(row_id, text)
    return list(merged.items())


def extract_source(module: str, source: bytes) -> list[Row]:
    """The rows of one module; of several definitions with one name, the first that has a docstring.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: the source does not parse.
    """
    rows: dict[str, str] = {}
    for name, node in _public_definitions(ast.parse(source).body, module):
        if name not in rows and (text := first_paragraph(ast.get_docstring(node, clean=False) or "", node.name)):
            rows[name] = text
    return list(rows.items())


def first_paragraph(docstring: str, name: str) -> str:
    """The first paragraph after leading signatures of `name`, on one line; empty when there is none."""
    text = inspect.cleandoc(docstring)
    text = text[_signature_end(text, name) :].lstrip()
    paragraph = _PARAGRAPH_END.split(text, maxsplit=1)[0]
    # A literal may hold half a surrogate pair, which no file can store.
    return _BLANKS.sub(" ", paragraph).strip().encode("utf-8", "replace").decode("utf-8")


def _scattered(files: Sequence[SourceFile], limit: int) -> list[int]:
    """The files' indexes in the order of parsing, the same on every machine.

    Files with many docstrings for their size come first. Choosing twice as many of those as are needed keeps some
    variety and halves the bytes that are parsed.
    """
    counts = [_count(file) for file in files]
    scattered = sorted(range(len(files)), key=lambda index: (zlib.crc32(files[index].module.encode()), index))
    densest = sorted(scattered, key=lambda index: -counts[index] / max(1, files[index].size))
    enough = bisect_left(list(accumulate(counts[index] for index in densest)), 2 * limit) + 1
    first = set(densest[:enough])
    return sorted(scattered, key=lambda index: index not in first)


def _count(file: SourceFile) -> int:
    try:
        return len(_DOCSTRING_START.findall(file.path.read_bytes()))
    except OSError:
        return 0


def _rows(file: SourceFile) -> list[Row]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the packages' sources
        try:
            return extract_source(file.module, file.path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return []


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


def _signature_end(text: str, name: str) -> int:
    """Where lines such as `name(a, b=1) -> int` or `out = name(a)` at the start of a docstring end; 0 without any."""
    end = 0
    while (match := _SIGNATURE_START.match(text, end)) and match[1] == name:
        depth, position = 1, match.end()
        while depth and position < len(text):
            depth += {"(": 1, ")": -1}.get(text[position], 0)
            position += 1
        rest = _SIGNATURE_REST.match(text, position)
        if depth or rest is None:
            break
        end = rest.end()
    return end


def _is_public(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_")
