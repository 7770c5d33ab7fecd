"""Memory that reading a source takes: no page, no dictionary and no row group brings a run beyond
its limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import Output, failures, finish, receipts
from tests.small_catalogs import keys_of

pytestmark = pytest.mark.processes

MEGABYTE = 1_000_000
# Reads every partition in a process of its own and gives the rows and the growth of its resident
# memory in bytes.
READER = """
import json, pathlib, re, sys
from surge_dagster.engine.tables.opening import open_source

def peak():  # getrusage counts what the parent process held when it forked
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])

partitions = list(open_source(sys.argv[1]))
before = peak()
rows = sum(len(batch) for partition in partitions for batch in partition.read())
print(json.dumps([rows, peak() - before]))
"""


def write(root: Path, key: str, texts: pa.Array, **options: Any) -> Path:
    folder = root / f"partition={key}"
    folder.mkdir(parents=True)
    pq.write_table(
        pa.table({"id": pa.array(range(len(texts))), "text": texts}),
        folder / "part-0.parquet",
        **options,
    )
    return folder / "part-0.parquet"


ONE_TEXT = pa.array(["x" * (4 * MEGABYTE)])
SHARED = {
    "as strings with a dictionary": {},
    "as the beginnings of others": {
        "use_dictionary": False,
        "column_encoding": {"text": "DELTA_BYTE_ARRAY"},
    },
    "as a dictionary of arrow's": {},
}


@pytest.mark.parametrize("how", SHARED)
def test_rows_that_share_one_long_text_are_decoded_a_few_at_a_time(
    tmp_path: Path, how: str
) -> None:
    """Takes seconds: each file holds 400 MB in some ten kilobytes."""
    texts = ONE_TEXT.take(pa.array(np.zeros(100, np.int64)))
    if how == "as a dictionary of arrow's":
        texts = texts.dictionary_encode()
    file = write(tmp_path, "a", texts, compression="zstd", **SHARED[how])
    assert file.stat().st_size < 100_000
    ran = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    rows, grown = json.loads(ran.stdout)
    print(f"{how}: {grown / MEGABYTE:.0f} MB")
    assert rows == 100
    assert grown < 200 * MEGABYTE


def test_row_group_that_does_not_fit_is_refused_with_a_limit_that_works(
    output: Output, tmp_path: Path
) -> None:
    """Takes seconds: the texts have 60 MB, and a page holds all of them."""
    random = np.random.default_rng(4)
    letters = random.integers(97, 123, (60, MEGABYTE), np.uint8)
    texts = pa.array(letters.view(f"S{MEGABYTE}").ravel()).cast(pa.string())
    write(tmp_path / "catalog", "large", texts)
    write(tmp_path / "catalog", "small", texts, row_group_size=5)
    limit = 250 * MEGABYTE
    thresholds = Thresholds(max_text_bytes=2 * MEGABYTE)
    source = open_source(tmp_path / "catalog")
    run = output.run(source, thresholds, memory_limit_bytes=limit)
    [refused] = failures(finish(run))
    assert refused.key == "large"
    assert not refused.transient
    assert "reading its largest row group may take 180," in refused.reason
    assert run.memory.ledger.peak <= limit
    assert refused.remedy.startswith("Write row groups of fewer rows, or set memory_l")
    raised = int(refused.remedy.rpartition(" ")[2].rstrip(".").replace(",", ""))
    run = output.run(source, thresholds, memory_limit_bytes=raised)
    assert keys_of(receipts(finish(run), "encoded")) == ["large"]
    assert 180 * MEGABYTE < run.memory.ledger.peak <= raised
