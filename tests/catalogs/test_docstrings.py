"""Tests of reading docstrings: which definitions are rows, and which part of a docstring is the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster.catalogs.docstrings import (
    SourceFile,
    count_docstrings,
    extract,
    extract_source,
    first_paragraph,
    module_name,
)


def source_file(folder: Path, module: str, content: str | bytes) -> SourceFile:
    path = folder / f"{module}.py"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return SourceFile(module, path, path.stat().st_size)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("six.py", "six"),
        ("torch/nn/functional.py", "torch.nn.functional"),
        ("torch/__init__.py", "torch"),
        ("torch/_C.py", None),
        ("torch/_dynamo/config.py", None),
        ("torch/__main__.py", None),
        ("torch/nn/functional.pyi", None),
        ("../../../bin/tool.py", None),
        ("tool-1.0.data/scripts/run.py", None),
        ("__init__.py", None),
    ],
)
def test_module_name_is_the_dotted_path_and_none_for_private_modules(path: str, expected: str | None) -> None:
    assert module_name(path) == expected


def test_public_classes_functions_and_methods_are_rows_in_file_order() -> None:
    source = b'''
"""A module's own docstring is no row."""
def load(): "Load it."
async def fetch():
    """Fetch it."""
    def inner():
        """Out of reach from outside."""
class Table:
    """A table."""
    def rows(self):
        """Its rows."""
    class Cell:
        """A cell."""
        def value(self):
            """Its value."""
    def _hidden(self):
        """Private."""
def silent(): pass
def _private():
    """Private."""
class _Private:
    """Private."""
    def method(self):
        """Private by its class."""
'''
    assert extract_source("pkg.mod", source) == [
        ("pkg.mod.load", "Load it."),
        ("pkg.mod.fetch", "Fetch it."),
        ("pkg.mod.Table", "A table."),
        ("pkg.mod.Table.rows", "Its rows."),
        ("pkg.mod.Table.Cell", "A cell."),
        ("pkg.mod.Table.Cell.value", "Its value."),
    ]


def test_first_documented_definition_of_a_name_is_the_row() -> None:
    source = b'''
from typing import overload
@overload
def read(path: str) -> str: ...
def read(path):
    """The one that is documented."""
if True:
    def write():
        """On this platform."""
else:
    def write():
        """On another platform."""
try:
    import fast
except ImportError:
    def fallback():
        """Slow."""
with open("x"):
    class Inside:
        """Within a block."""
class Size:
    @property
    def width(self):
        """The width."""
    @width.setter
    def width(self, value):
        """Set the width."""
'''
    assert extract_source("m", source) == [
        ("m.read", "The one that is documented."),
        ("m.write", "On this platform."),
        ("m.fallback", "Slow."),
        ("m.Inside", "Within a block."),
        ("m.Size.width", "The width."),
    ]


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("One line.", "One line."),
        ("\n    Two lines that\n    belong together.\n\n    And more.\n", "Two lines that belong together."),
        ("Blanks \t  are\n  one.   \n  \t\n rest", "Blanks are one."),
        ("", ""),
        ("   \n\n  ", ""),
        ("parse(text, *, strict=False) -> int\n\nParse it.", "Parse it."),
        ("parse(text)\nParse it.", "Parse it."),
        ("out = parse(text)\n\nParse it.", "Parse it."),
        ("mod.parse(text, default=(1, 2))\n\nParse it.", "Parse it."),
        ("parse(text,\n      strict=True) -> dict[str, int]\n\nParse it.", "Parse it."),
        ("parse(text)\nparse(text, base)\n\nParse it.", "Parse it."),
        ("parse(text)", ""),
        ("parse(text) turns text into numbers.", "parse(text) turns text into numbers."),
        ("other(text)\n\nNot a signature of this one.", "other(text)"),
        ("parse(unbalanced\n\nStays.", "parse(unbalanced"),
        ("Half a pair: \ud800.", "Half a pair: ?."),
    ],
)
def test_text_is_the_first_paragraph_on_one_line_without_signature(docstring: str, expected: str) -> None:
    assert first_paragraph(docstring, "parse") == expected


def test_files_that_do_not_parse_are_skipped(tmp_path: Path) -> None:
    good = 'def f():\n    """Good."""\n'
    files = [
        source_file(tmp_path, "syntax", "def f(:\n"),
        source_file(tmp_path, "python2", 'def f():\n    """Old."""\n    print "x"\n'),
        source_file(tmp_path, "nulls", good.encode() + b"\0"),
        source_file(tmp_path, "undecodable", b'def f():\n    """\xff"""\n'),
        source_file(tmp_path, "encoding", b"# coding: no-such-encoding\n" + good.encode()),
        source_file(tmp_path, "nested", "x = " + "(" * 2_000 + ")" * 2_000 + "\n" + good),
        SourceFile("missing", tmp_path / "missing.py", 10),
        source_file(tmp_path, "latin", b'# coding: latin-1\ndef f():\n    """Caf\xe9."""\n'),
        source_file(tmp_path, "good", good),
    ]
    assert extract(files) == [("latin.f", "Café."), ("good.f", "Good.")]


def test_sources_are_never_executed(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    source = f'open({str(ran)!r}, "w")\nraise SystemExit\ndef f():\n    """Documented."""\n'
    assert extract([source_file(tmp_path, "m", source)]) == [("m.f", "Documented.")]
    assert not ran.exists()


def test_limit_takes_rows_from_scattered_files_in_file_order(tmp_path: Path) -> None:
    files = [
        source_file(tmp_path, f"m{n:02}", "".join(f'def f{i}():\n    """Text {i}."""\n' for i in range(5)))
        for n in range(40)
    ]
    everything = extract(files)
    capped = extract(files, 50)
    assert len(capped) == 50
    assert capped == [row for row in everything if row in capped]
    modules = sorted({row[0].split(".")[0] for row in capped})
    assert modules[0] < "m10"
    assert modules[-1] > "m30"
    assert set(extract(files, 20)) <= set(capped)
    assert extract(files, 10_000) == everything


def test_quick_count_is_the_number_of_rows_of_plain_sources(tmp_path: Path) -> None:
    source = 'class A:\n    """A."""\n    def f(self, x: int) -> None:\n        r"""F."""\n'
    source += "def g():\r\n    '''G.'''\r\n"
    files = [source_file(tmp_path, "m", source), SourceFile("missing", tmp_path / "missing.py", 0)]
    assert count_docstrings(files) == len(extract(files)) == 3
