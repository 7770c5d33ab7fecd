"""Tests of the demo catalog: its partitions and rows, its limit, and rebuilding without rewriting."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.catalogs.demo import build_demo_catalog, share_out
from surge_dagster.catalogs.folder import CatalogSummary
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources import open_source
from tests.catalogs.installed import functions, install, on_disk, rows_of, sizes_of, uninstall


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


def test_distributions_are_partitions_and_rows_follow_paths_and_lines(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "catalog"
    assert build(site, out) == CatalogSummary(partitions=4, texts=664, written=4, unchanged=0, removed=0)
    assert sizes_of(out) == {"Small%2EOne": 3, "huge": 600, "middle": 60, "tiny": 1}
    assert rows_of(out, "tiny") == [("tiny.task_0", "task number 0.")]
    names = [row[0] for row in rows_of(out, "middle")]
    assert names == [f"middle.{module}.task_{n}" for module, count in (("a", 20), ("b", 40)) for n in range(count)]


def test_source_version_is_the_version_and_record_hash(site: Path, tmp_path: Path) -> None:
    build(site, tmp_path / "catalog")
    partitions = {partition.key: partition for partition in open_source(str(tmp_path / "catalog"))}
    assert list(partitions) == ["Small.One", "huge", "middle", "tiny"]
    record = (site / "huge-1.0.dist-info" / "RECORD").read_bytes()
    assert partitions["huge"].source_version == f"1.0+{hashlib.sha256(record).hexdigest()[:16]}"
    assert sum(len(batch) for batch in partitions["huge"].read()) == 600


@pytest.mark.parametrize("limit", [None, 200])
def test_build_without_an_upgrade_rewrites_nothing(site: Path, tmp_path: Path, limit: int | None) -> None:
    out = tmp_path / "catalog"
    first = build(site, out, limit)
    before = on_disk(out)
    again = build(site, out, limit)
    assert (again.written, again.unchanged, again.removed) == (0, 4, 0)
    assert (again.partitions, again.texts) == (first.partitions, first.texts)
    assert on_disk(out) == before


@pytest.mark.parametrize("limit", [None, 200])
def test_upgrade_rewrites_only_its_partition(site: Path, tmp_path: Path, limit: int | None) -> None:
    out = tmp_path / "catalog"
    build(site, out, limit)
    before = on_disk(out)
    install(site, "middle", {"middle/a.py": functions(20, prefix="job"), "middle/b.py": functions(41)}, "1.1")
    summary = build(site, out, limit)
    assert (summary.written, summary.unchanged) == (1, 3)
    changed = {path for path, state in on_disk(out).items() if state != before[path]}
    assert changed == {"partition=middle/part-0.parquet", "_catalog.json"}
    versions = {partition.key: partition.source_version for partition in open_source(str(out))}
    assert versions["middle"].startswith("1.1+")


def test_partitions_of_uninstalled_or_undocumented_packages_are_removed(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "catalog"
    build(site, out)
    uninstall(site, "tiny")
    install(site, "middle", {"middle/a.py": "x = 1\n"}, "2.0")
    summary = build(site, out)
    assert (summary.partitions, summary.removed) == (2, 2)
    assert set(sizes_of(out)) == {"Small%2EOne", "huge"}
    assert build(site, out).removed == 0


def test_limit_caps_the_texts_and_keeps_the_ratio_of_sizes(site: Path, tmp_path: Path) -> None:
    whole, capped = tmp_path / "whole", tmp_path / "capped"
    build(site, whole)
    summary = build(site, capped, 100)
    sizes = sizes_of(capped)
    assert 90 <= summary.texts == sum(sizes.values()) <= 100
    assert set(sizes) == set(sizes_of(whole))
    assert sizes["tiny"] == 1
    assert 8 <= sizes["huge"] / sizes["middle"] <= 12
    for key in ("huge", "middle"):
        assert set(rows_of(capped, key)) < set(rows_of(whole, key))


def test_limit_above_the_number_of_texts_takes_all(site: Path, tmp_path: Path) -> None:
    assert build(site, tmp_path / "catalog", 10**9).texts == 664
    assert build(site, tmp_path / "catalog").written == 0


def test_limit_below_the_number_of_distributions_takes_one_text_of_the_largest(site: Path, tmp_path: Path) -> None:
    assert build(site, tmp_path / "catalog", 2).texts == 2
    assert sizes_of(tmp_path / "catalog") == {"huge": 1, "middle": 1}


def test_changed_limit_changes_the_version_of_partitions_that_it_cuts(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "catalog"
    build(site, out, 100)
    capped = {partition.key: partition.source_version for partition in open_source(str(out))}
    summary = build(site, out)
    whole = {partition.key: partition.source_version for partition in open_source(str(out))}
    assert summary.texts == 664
    assert {key for key in whole if whole[key] != capped[key]} >= {"huge", "middle"}
    assert build(site, out, 100).texts <= 100
    assert {partition.key: partition.source_version for partition in open_source(str(out))} == capped


def test_interrupted_build_continues_where_it_stopped(site: Path, tmp_path: Path) -> None:
    out, straight = tmp_path / "catalog", tmp_path / "straight"

    def interrupt(done: int, total: int) -> None:
        if len(sizes_of(out)) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_demo_catalog(out, search_path=[str(site)], progress=interrupt)
    written = sizes_of(out)
    assert len(written) == 2
    summary = build(site, out)
    assert (summary.written, summary.unchanged) == (2, 2)
    build(site, straight)
    assert sizes_of(out) == sizes_of(straight)
    assert all(rows_of(out, key) == rows_of(straight, key) for key in ("huge", "middle", "Small.One", "tiny"))


def test_damaged_missing_and_unfinished_files_are_replaced(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "catalog"
    build(site, out)
    (out / "partition=huge" / "part-0.parquet").write_bytes(b"PAR1")
    (out / "partition=tiny" / "part-0.parquet").unlink()
    (out / "partition=middle" / ".part-0.parquet.4711.tmp").write_bytes(b"half")
    assert build(site, out).written == 2
    assert sizes_of(out)["huge"] == 600
    assert not list(out.rglob("*.tmp"))


def test_progress_ends_at_its_total(site: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_demo_catalog(
        tmp_path / "catalog", search_path=[str(site)], progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_equal_ids_within_a_distribution_become_one_row(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "twice", {"twice.py": functions(2), "twice/__init__.py": functions(3)})
    build(site, tmp_path / "catalog")
    assert [row[0] for row in rows_of(tmp_path / "catalog", "twice")] == [f"twice.task_{n}" for n in range(3)]


def test_distributions_without_record_metadata_or_sources_are_left_out(site: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("limit", [0, -5])
def test_limit_below_one_is_refused(site: Path, tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        build(site, tmp_path / "catalog", limit)
    assert not (tmp_path / "catalog").exists()


@given(
    counts=st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 5_000), max_size=12),
    limit=st.integers(1, 20_000),
)
def test_shares_follow_the_counts_within_the_limit(counts: dict[str, int], limit: int) -> None:
    scale, dealt = share_out(counts, limit)
    assert sum(dealt.values()) <= limit
    assert all(share >= 1 for share in dealt.values())
    assert len(dealt) == min(len(counts), limit)
    ranked = sorted(dealt, key=lambda name: counts[name])
    assert [dealt[name] for name in ranked] == sorted(dealt.values())
    assert share_out(counts, limit, scale) == (scale, dealt)


def test_factor_is_kept_unless_shares_exceed_the_limit_or_use_too_little() -> None:
    scale, shares = share_out({"a": 800, "b": 200}, 100)
    kept, grown = share_out({"a": 800, "b": 210}, 100, scale)
    assert (kept, grown["a"]) == (scale, shares["a"])
    assert share_out({"a": 800, "b": 400}, 100, scale)[0] < scale
    assert share_out({"a": 400, "b": 200}, 100, scale)[0] > scale


@pytest.mark.soak
def test_installed_packages_make_a_catalog_with_partitions_of_very_different_sizes(tmp_path: Path) -> None:
    """Takes many seconds: it reads the sources of all installed packages."""
    summary = build_demo_catalog(tmp_path / "catalog", limit=400)
    sizes = sizes_of(tmp_path / "catalog")
    assert summary.texts <= 400
    assert {"torch", "dagster", "transformers", "polars"} <= set(sizes)
    assert max(sizes.values()) >= sizes["transformers"] > 20 * min(sizes.values())
    before = on_disk(tmp_path / "catalog")
    assert build_demo_catalog(tmp_path / "catalog", limit=400).written == 0
    assert on_disk(tmp_path / "catalog") == before
