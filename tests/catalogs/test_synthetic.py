"""Tests of the synthetic catalog: its sizes and texts, a second build, and the memory of a build."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.catalogs.folder import CatalogSummary
from surge_dagster.catalogs.synthetic import build_synthetic_catalog, draw_texts, partition_sizes
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.tables.opening import open_source
from tests.catalogs.installed import rows_of, sizes_of


def texts_of(seed: int, number: int, count: int, mean_bytes: int = 47) -> list[str]:
    return draw_texts(seed, number, np.arange(count, dtype=np.uint64), mean_bytes).to_pylist()


@given(
    partitions=st.integers(1, 300),
    surplus=st.integers(0, 100_000),
    sigma=st.floats(0, 5),
    seed=st.integers(0, 2**70),
)
def test_sizes_sum_to_the_number_of_texts_and_none_is_zero(
    partitions: int, surplus: int, sigma: float, seed: int
) -> None:
    sizes = partition_sizes(partitions + surplus, partitions, sigma, seed)
    assert (len(sizes), sizes.sum()) == (partitions, partitions + surplus)
    assert sizes.min() >= 1
    assert np.array_equal(sizes, partition_sizes(partitions + surplus, partitions, sigma, seed))


@pytest.mark.parametrize("sigma", [1.0, 1.72, 2.5])
def test_sizes_are_log_normal_with_the_given_sigma(sigma: float) -> None:
    logs = np.log(partition_sizes(400_000_000, 4_000, sigma))
    assert np.std(logs) == pytest.approx(sigma, rel=0.05)
    inner = np.quantile(logs, [0.0228, 0.1587, 0.5, 0.8413, 0.9772]) - np.median(logs)
    assert inner == pytest.approx(np.array([-2, -1, 0, 1, 2]) * sigma, abs=0.2 * sigma)


def test_scaling_keeps_the_ratio_of_median_to_mean() -> None:
    """The published parameters give a mean of 36,600; 10M texts in 4,000 partitions have a mean of
    2,500."""
    sizes = partition_sizes(10_000_000, 4_000)
    assert sizes.mean() == 2_500
    assert np.median(sizes) == pytest.approx(8_350 * 2_500 / 36_600, rel=0.15)


def test_sizes_and_texts_are_the_same_on_every_machine() -> None:
    assert partition_sizes(1_000, 8, seed=1).tolist() == [19, 154, 512, 74, 4, 161, 37, 39]
    assert texts_of(1, 3, 3) == [
        "outdoor soft gold cushion spare digital velvet",
        "narrow velvet plate 250ml adjustable leather backpack spare adjustable",
        "cooling oak sandal handle portable silk tablet holder stackable",
    ]


def test_mean_text_length_is_the_requested_one() -> None:
    for mean_bytes in (16, 47, 200, 5_000):
        count = max(200, 400_000 // mean_bytes)
        lengths = pc.call_function(
            "binary_length", [draw_texts(0, 1, np.arange(count, dtype=np.uint64), mean_bytes)]
        ).to_numpy()
        assert lengths.mean() == pytest.approx(mean_bytes, rel=0.03)
        assert lengths.min() > 0


def test_text_depends_only_on_seed_partition_and_row() -> None:
    whole = texts_of(5, 2, 1_000)
    assert draw_texts(5, 2, np.arange(400, 700, dtype=np.uint64)).to_pylist() == whole[400:700]
    assert texts_of(5, 3, 1_000) != whole
    assert texts_of(6, 2, 1_000) != whole
    assert len(set(whole)) > 990
    rows = np.arange(20, dtype=np.uint64)
    long = draw_texts(5, 2, rows, 3_000).to_pylist()  # over 255 words each
    assert [draw_texts(5, 2, rows[row : row + 1], 3_000).to_pylist() for row in range(20)] == [
        [text] for text in long
    ]


def test_engine_reads_the_catalog(tmp_path: Path) -> None:
    summary = build_synthetic_catalog(tmp_path, texts=5_000, partitions=12)
    assert summary == CatalogSummary(partitions=12, texts=5_000)
    partitions = list(open_source(str(tmp_path)))
    assert [partition.key for partition in partitions] == [f"category-{n:04}" for n in range(1, 13)]
    read = [
        pa.Table.from_batches([pa.record_batch([b.ids, b.texts], ["id", "text"])])
        for p in partitions
        for b in p.read()
    ]
    table = pa.concat_tables(read)
    assert (len(table), len(set(table["id"].to_pylist()))) == (5_000, 5_000)
    assert [row[1] for row in rows_of(tmp_path, "category-0007")] == texts_of(
        0, 7, sizes_of(tmp_path)["category-0007"]
    )


def test_second_build_gives_equal_rows_and_versions_and_one_with_other_arguments_replaces_them(
    tmp_path: Path,
) -> None:
    def built(**arguments: Any) -> tuple[dict[str, str], list[tuple[str, str]]]:
        build_synthetic_catalog(tmp_path, texts=2_000, **arguments)
        assert sum(sizes_of(tmp_path).values()) == 2_000
        versions = {
            partition.key: partition.source_version for partition in open_source(str(tmp_path))
        }
        return versions, rows_of(tmp_path, "category-0003")

    first, again, other = built(partitions=5), built(partitions=5), built(partitions=3, seed=1)
    assert first == again and len(other[0]) == 3
    assert not other[0].items() & first[0].items() and other[1] != first[1]


def test_row_groups_are_bounded_in_rows_and_in_bytes(tmp_path: Path) -> None:
    build_synthetic_catalog(tmp_path / "short", texts=150_000, partitions=1)
    build_synthetic_catalog(tmp_path / "long", texts=1_000, partitions=1, mean_bytes=20_000)
    for name, most_rows in (("short", 65_536), ("long", 420)):
        metadata = pq.read_metadata(tmp_path / name / "partition=category-0001" / "part-0.parquet")
        assert max(
            metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)
        ) == pytest.approx(most_rows, rel=0.01)


@pytest.mark.soak
def test_memory_does_not_grow_with_the_catalog(tmp_path: Path) -> None:
    """Two million texts and their ids have 120 MB. A tenth of them needs as much memory."""
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from surge_dagster.catalogs.synthetic import build_synthetic_catalog\n"
        "build_synthetic_catalog(Path(sys.argv[1]), texts=int(sys.argv[2]), partitions=1)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )

    def peak_kib(texts: int) -> int:
        command = [sys.executable, "-c", script, str(tmp_path / str(texts)), str(texts)]
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    assert peak_kib(2_000_000) - peak_kib(200_000) < 40_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": 5, "partitions": 6}, "can't fill"),
        ({"texts": 5, "partitions": 0}, "can't fill"),
        ({"texts": 5, "partitions": 5, "sigma": -1.0}, "sigma"),
        ({"texts": 5, "partitions": 5, "sigma": math.nan}, "sigma"),
        ({"texts": 5, "partitions": 5, "mean_bytes": 15}, "mean size"),
    ],
)
def test_arguments_out_of_range_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_synthetic_catalog(tmp_path / "catalog", **arguments)
    assert not (tmp_path / "catalog").exists()
