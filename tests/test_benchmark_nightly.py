"""The benchmark of incremental runs compares the runs of a pair, and takes the median of the pairs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import nightly


def test_runs_of_a_pair_encode_what_changed_and_equal_texts_once() -> None:
    document = nightly.measure(nightly.parse(["--partitions=3", "--rows=100", "--pairs=2", "--model=hash://16"]))
    pairs: list[Any] = document["pairs"]
    assert [list(pair) for pair in pairs] == [
        ["full", "incremental", "once", "each"],
        ["full", "incremental", "each", "once"],
    ]
    for pair in pairs:
        encoded = {name: run["texts_encoded"] for name, run in pair.items()}
        assert (encoded["full"], encoded["incremental"]) == (300, 3)
        assert (pair["once"]["texts_deduplicated"], pair["each"]["texts_deduplicated"]) == (26, 0)
    assert len(list(nightly.lines(document))) == 1 + 8


def test_aims_are_compared_with_the_median_of_the_pairs() -> None:
    def run(value: float) -> dict[str, float]:
        return dict.fromkeys(("encode_seconds", "wall_seconds", "output_bytes"), value)

    pairs = [{"full": run(100), "incremental": run(part), "once": run(8), "each": run(10)} for part in (1, 2, 90)]
    measured = [target.measured for target in nightly.targets({"pairs": pairs})]
    assert measured == pytest.approx([0.02, 0.02, 0.02, 0.2])
