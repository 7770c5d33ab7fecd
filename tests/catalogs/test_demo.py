"""Tests of the demo catalog: its partitions and rows, its limit, and a second build."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from surge_dagster.catalogs.demo import (
    CatalogSummary,
    SourceFile,
    build_demo_catalog,
    extract,
    extract_source,
    first_paragraph,
    module_name,
)
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.tables.opening import open_source
from tests.catalogs.installed import functions, install, rows_of, sizes_of, uninstall


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment with partitions of very different sizes; `quiet` has no public docstring."""
    site = tmp_path / "site"
    install(site, "huge", {f"huge/m{n:02}.py": functions(30) for n in range(20)})
    install(site, "middle", {"middle/b.py": functions(40), "middle/a.py": functions(20)})
    install(site, "Small.One", {"small_one.py": functions(3)})
    install(site, "tiny", {"tiny/__init__.py": functions(1)})
    install(site, "quiet", {"quiet.py": "def f(): pass\n", "_quiet.py": functions(9)})
    return site


def build(site: Path, out: Path, limit: int | None = None) -> CatalogSummary:
    return build_demo_catalog(out, limit=limit, search_path=[str(site)])


def source_file(folder: Path, module: str, content: str | bytes) -> SourceFile:
    path = folder / f"{module}.py"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return SourceFile(module, path, path.stat().st_size)


def versions(catalog: Path) -> dict[str, str]:
    return {partition.key: partition.source_version for partition in open_source(str(catalog))}


def test_distributions_are_partitions_and_rows_follow_paths_and_lines(
    site: Path, tmp_path: Path
) -> None:
    out, seen = tmp_path / "catalog", list[tuple[int, int]]()
    summary = build_demo_catalog(
        out, search_path=[str(site)], progress=lambda *progress: seen.append(progress)
    )
    assert summary == CatalogSummary(partitions=4, texts=664)
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0
    assert sizes_of(out) == {"Small%2EOne": 3, "huge": 600, "middle": 60, "tiny": 1}
    assert rows_of(out, "tiny") == [("tiny.task_0", "task number 0.")]
    record = (site / "huge-1.0.dist-info" / "RECORD").read_bytes()
    assert versions(out)["huge"] == f"1.0+{hashlib.sha256(record).hexdigest()[:16]}"
    names = [row[0] for row in rows_of(out, "middle")]
    assert names == [
        f"middle.{module}.task_{n}"
        for module, count in (("a", 20), ("b", 40))
        for n in range(count)
    ]


@pytest.mark.parametrize("limit", [None, 200])
def test_second_build_keeps_rows_and_source_versions(
    site: Path, tmp_path: Path, limit: int | None
) -> None:
    out = tmp_path / "catalog"
    first = build(site, out, limit)
    before, rows = versions(out), rows_of(out, "huge")
    (out / "partition=middle" / "left.parquet").write_bytes(b"half")
    assert build(site, out, limit) == first
    assert (versions(out), rows_of(out, "huge")) == (before, rows)


def test_upgrade_changes_its_partition_and_uninstalled_packages_are_removed(
    site: Path, tmp_path: Path
) -> None:
    out = tmp_path / "catalog"
    build(site, out)
    before = versions(out)
    install(site, "middle", {"middle/a.py": functions(20, prefix="job")}, "1.1")
    uninstall(site, "tiny")
    assert build(site, out).partitions == 3
    after = versions(out)
    assert after.keys() == {"Small.One", "huge", "middle"} and after["middle"].startswith("1.1+")
    assert {key for key in after if after[key] != before[key]} == {"middle"}


def test_limit_caps_the_texts_and_keeps_the_ratio_of_sizes(site: Path, tmp_path: Path) -> None:
    whole, capped = tmp_path / "whole", tmp_path / "capped"
    build(site, whole)
    summary = build(site, capped, 100)
    sizes = sizes_of(capped)
    assert 90 <= summary.texts == sum(sizes.values()) <= 104
    assert set(sizes) == set(sizes_of(whole))
    assert sizes["tiny"] == 1
    assert 8 <= sizes["huge"] / sizes["middle"] <= 12
    for key in ("huge", "middle"):
        assert set(rows_of(capped, key)) < set(rows_of(whole, key))
        assert versions(capped)[key] != versions(whole)[key]
    assert build(site, capped, 10**9).texts == 664, "a limit above the number of texts takes all"


def test_equal_ids_within_a_distribution_become_one_row(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "twice", {"twice.py": functions(2), "twice/__init__.py": functions(3)})
    build(site, tmp_path / "catalog")
    assert [row[0] for row in rows_of(tmp_path / "catalog", "twice")] == [
        f"twice.task_{n}" for n in range(3)
    ]


def test_distributions_without_record_metadata_or_sources_are_left_out(
    site: Path, tmp_path: Path
) -> None:
    install(site, "norecord", {"norecord.py": functions(2)})
    (site / "norecord-1.0.dist-info" / "RECORD").unlink()
    install(site, "nometadata", {"nometadata.py": functions(2)})
    (site / "nometadata-1.0.dist-info" / "METADATA").unlink()
    install(site, "deleted", {"deleted.py": functions(2)})
    (site / "deleted.py").unlink()
    assert build(site, tmp_path / "catalog").partitions == 4


def test_folder_that_holds_something_else_is_refused_unchanged(site: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign" / "partition=mine" / "part-0.parquet"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="not empty"):
        build(site, tmp_path / "foreign")
    assert [path for path in (tmp_path / "foreign").rglob("*") if path.is_file()] == [foreign]
    with pytest.raises(ConfigError, match="can't be used"):
        build(site, foreign)
    (tmp_path / "_catalog.json").write_text('{"format": 1, "kind": "synthetic"}')
    with pytest.raises(ConfigError, match="not built as a demo catalog"):
        build(site, tmp_path)


@pytest.mark.parametrize("limit", [0, -5])
def test_limit_below_one_is_refused(site: Path, tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        build(site, tmp_path / "catalog", limit)
    assert not (tmp_path / "catalog").exists()


@pytest.mark.soak
def test_installed_packages_make_a_catalog_with_partitions_of_very_different_sizes(
    tmp_path: Path,
) -> None:
    """Takes some seconds: it reads the sources of all installed packages."""
    build_demo_catalog(tmp_path / "catalog", limit=400)
    sizes = sizes_of(tmp_path / "catalog")
    assert {"torch", "dagster", "transformers", "polars"} <= set(sizes)
    assert max(sizes.values()) >= sizes["transformers"] > 20 * min(sizes.values())


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
def test_module_name_is_the_dotted_path_and_none_for_private_modules(
    path: str, expected: str | None
) -> None:
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
    assert list(extract_source("pkg.mod", source).items()) == [
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
    assert list(extract_source("m", source).items()) == [
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
        (
            "\n    Two lines that\n    belong together.\n\n    And more.\n",
            "Two lines that belong together.",
        ),
        ("Blanks \t  are\n  one.   \n  \t\n rest", "Blanks are one."),
        ("", ""),
        ("   \n\n  ", ""),
        ("Half a pair: \ud800.", "Half a pair: ?."),
    ],
)
def test_text_is_the_first_paragraph_on_one_line(docstring: str, expected: str) -> None:
    assert first_paragraph(docstring) == expected


def test_files_that_do_not_parse_are_skipped(tmp_path: Path) -> None:
    good = 'def f():\n    """Good."""\n'
    files = [
        source_file(tmp_path, "syntax", "def f(:\n"),
        source_file(tmp_path, "undecodable", b'def f():\n    """\xff"""\n'),
        source_file(tmp_path, "nested", "x = " + "(" * 2_000 + ")" * 2_000 + "\n" + good),
        SourceFile("missing", tmp_path / "missing.py", 10),
        source_file(tmp_path, "latin", b'# coding: latin-1\ndef f():\n    """Caf\xe9."""\n'),
        source_file(tmp_path, "good", good),
    ]
    assert extract(files) == {"latin.f": "Café.", "good.f": "Good."}


def test_sources_are_never_executed(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    source = f'open({str(ran)!r}, "w")\nraise SystemExit\ndef f():\n    """Documented."""\n'
    assert extract([source_file(tmp_path, "m", source)]) == {"m.f": "Documented."}
    assert not ran.exists()
