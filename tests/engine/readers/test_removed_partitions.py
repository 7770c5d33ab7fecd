"""Readers leave out partitions that were removed from the source, unless asked for them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from surge_dagster import changes, open_embeddings
from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.rejected import list_name
from surge_dagster.engine.readers.removed_partitions import (
    find_removed,
    handle_removed,
    record_removed,
    recorded_removed,
)
from surge_dagster.engine.run.staging import STAGING
from tests.engine.outputs import Load, Output, both_ways, output

__all__ = ["output"]
LONG = "long key " * 60


def settle(output: Output, *listed: str) -> str | None:
    """Record what the source no longer lists; why nothing was, where the listing is not trusted."""
    outputs = OutputState(output.store, output.space.name)
    return record_removed(
        outputs, output.space, find_removed(outputs, output.space, listed), listed
    )


def recorded(output: Output) -> list[str]:
    return sorted(recorded_removed(output.store, output.space))


@both_ways
def test_removed_partition_is_left_out_until_it_is_listed_again(output: Output, load: Load) -> None:
    for key in ("a", "b", LONG):
        output.put(key, 2)
    assert settle(output, "a", LONG) is None
    assert recorded(output) == ["b"]
    opened = open_embeddings(output.root)
    assert opened.keys() == ["a", LONG]
    assert opened.rows == 4
    assert "b" not in load(opened)["partition"].to_pylist()
    assert load(opened, ["b"]).num_rows == 2, "who names it gets it"
    assert open_embeddings(output.root, removed=True).keys() == ["a", "b", LONG]
    output.put("b", 3, source_version="v2")
    assert open_embeddings(output.root).rows == 7, (
        "another version of its file is none that was recorded"
    )
    assert settle(output, "a", LONG) is None
    assert open_embeddings(output.root).rows == 4
    assert settle(output, "a", "b", LONG) is None
    assert open_embeddings(output.root).rows == 7


def test_staged_rows_of_a_removed_partition_are_deleted_with_its_file(output: Output) -> None:
    for key in "ab":
        output.put(key, 2)
        staged = output.root / STAGING / output.space.name / key / "v1" / "0-1.parquet"
        staged.parent.mkdir(parents=True)
        staged.touch()
    outputs = OutputState(output.store, output.space.name)
    reporter = Mock()

    refusal = handle_removed(outputs, output.space, ["a"], reporter, delete=True)

    assert refusal is None
    left = (output.root / STAGING / output.space.name).iterdir()
    assert [folder.name for folder in left] == ["a"]


def test_list_of_rejected_rows_is_deleted_with_its_file(output: Output) -> None:
    for key in "ab":
        output.put(key, 2)
        path = output.root / list_name(output.space.name, key)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    outputs = OutputState(output.store, output.space.name)

    handle_removed(outputs, output.space, ["a"], Mock(), delete=True)

    assert (output.root / list_name(output.space.name, "a")).exists()
    assert not (output.root / list_name(output.space.name, "b")).exists()


def test_derived_space_and_change_feed_leave_out_what_its_parent_does(output: Output) -> None:
    output.put("a", 2)
    output.put("b", 2)
    derive = DeriveRun(output.store, output.space, "float32", 8)
    list(derive.events())
    feed = changes(output.store, consumer="shop", space=output.space.name)
    assert sum(len(batch) for partition in feed for batch in partition) == 2 + 4
    feed.confirm()
    assert settle(output, "a") is None
    assert open_embeddings(output.store, derive.space.name).keys() == ["a"]
    [removed] = changes(output.store, consumer="shop", space=output.space.name)
    assert removed.partition == "b"
    assert [batch["op"].to_pylist() for batch in removed] == [["clear"]]


@pytest.mark.parametrize("listed", [(), ("p00", "p01")])
def test_listing_that_lacks_much_of_the_catalog_hides_nothing(
    tmp_path: Path, listed: tuple[str, ...]
) -> None:
    output = Output(tmp_path / "out", EncodingSpec("hash://16"))
    keys = [f"p{number:02}" for number in range(20)]
    for key in keys:
        output.put(key, 1)
    assert settle(output, *keys[:18]) is None
    assert recorded(output) == ["p18", "p19"]
    refusal = settle(output, *listed)
    assert refusal
    assert f"{18 - len(listed)} of 18 partitions were removed" in refusal
    assert recorded(output) == keys[18:]
    assert settle(output, *keys[:16]) and recorded(output) == keys[18:], (
        "what is hidden makes the catalog no larger"
    )
    assert settle(output, *keys[:17]) is None and recorded(output) == keys[17:], (
        "a tenth more is taken"
    )
    only = Output(tmp_path / "one", EncodingSpec("hash://16"))
    only.put("a", 1)
    assert settle(only) and open_embeddings(only.root).keys() == ["a"], (
        "an empty source is never trusted"
    )


def test_long_key_that_is_listed_by_the_name_of_its_folder_is_not_removed(output: Output) -> None:
    output.put(LONG, 1)
    output.put("a", 1)
    assert settle(output, "a", output.path(LONG).stem) is None
    assert recorded(output) == []
    assert settle(output, "a") is None
    assert recorded(output) == [LONG]


@pytest.mark.parametrize("content", ["{", '{"partitions": {"": ["1", "2"]}}'])
def test_damaged_record_is_refused_by_name_and_can_be_removed(output: Output, content: str) -> None:
    output.put("a", 1)
    output.put("b", 1)
    settle(output, "a")
    [record] = output.root.glob("*/removed_partitions.json")
    record.write_text(content)
    with pytest.raises(ConfigError, match=r"removed_partitions\.json.*cannot be used.*Remove it"):
        open_embeddings(output.root)
    record.unlink()
    assert open_embeddings(output.root).keys() == ["a", "b"]
