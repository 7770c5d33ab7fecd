"""The benchmark of sources at a small size: its document has every figure, and every row came back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_document_has_every_figure_beside_its_aim(tmp_path: Path) -> None:
    sizes = ["--rows", "3000", "--keys", "20", "--partitions", "4"]
    command = [sys.executable, "-m", "benchmarks.sources", *sizes, "--folder", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    document = json.loads(run.stdout.splitlines()[-1])
    assert (document["shuffled"]["rows"], document["sorted"]["rows"]) == (3000, 3000)
    assert [found["partitions"] for found in document["folders"].values()] == [4, 4]
    assert document["folders"]["bucket"]["requests"] == {"LIST": 5, "GET": 8}
    assert [aim["measured"] > 0 for aim in document["targets"]] == [True] * 5
    assert "bytes of memory while grouping" in run.stdout
