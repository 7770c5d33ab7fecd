"""`surge-dagster derive`, and the commands that name a derived space."""

from __future__ import annotations

from tests.command import Command


def test_space_is_derived_verified_searched_and_made_current(surge: Command) -> None:
    for key in ("a", "b"):
        surge.write(key, 30)
    parent = surge.embed()["space"]
    made = surge.json("derive", "out", "--dtype", "binary")
    assert made["parent"] == parent
    assert made["partitions_written"] == 2
    assert made["rows"] == 60
    assert made["recall"] is None
    measured = surge.json("derive", "out", "--dtype", "binary", "--recall")
    assert measured["partitions_fresh"] == 2
    recall = measured["recall"]
    assert recall["queries"] == recall["rows"] == 60
    assert 0.2 < recall["overlap_at_10"] < 1
    verified = surge("verify", "catalog", "out", "--space", made["space"])[1]
    assert "60 vectors of 2 partitions compared: no violation" in verified
    [hit] = surge.json("search", "a number 7", "out", "-k", 1, "--space", made["space"])["hits"]
    assert hit["id"] == "a-7"
    surge.json("switch", "catalog", "out", "--space", made["space"])
    assert surge.json("search", "a number 7", "out", "-k", 1)["space"] == made["space"]
    again = surge.json("derive", "out", "--dtype", "binary")
    assert again["parent"] == parent
    assert again["partitions_fresh"] == 2


def test_damaged_and_removed_partitions_of_the_parent_are_reported(surge: Command) -> None:
    for key in ("a", "b", "c"):
        surge.write(key, 30)
    parent = surge.embed()["space"]
    own = surge.root / "out" / surge.json("derive", "out", "--dimension", 8)["space"]
    (surge.root / "out" / parent / "a.parquet").write_bytes(b"nothing")
    (surge.root / "out" / parent / "b.parquet").unlink()
    code, out, error = surge("derive", "out", "--dimension", 8)
    assert code == 1 and "refused: partition 'a'" in error and "partition 'b' was removed" in error
    assert "0 partitions written, 1 up to date, 1 failed" in out
    error = surge.error("derive", "out", "--dimension", 8, "--removed", "delete", expected=1)
    assert "'b'" not in error
    assert not (own / "b.parquet").exists()
    assert (own / "c.parquet").exists()
