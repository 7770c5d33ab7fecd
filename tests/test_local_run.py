"""`embed`: one call embeds any source, with the settings by their names, and failed partitions
cannot be overlooked."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from surge_dagster import DeletionRefused, PartitionsFailed, embed, open_embeddings
from surge_dagster.engine.errors import ConfigError
from tests.command import Command

FRAME = pl.DataFrame(
    {
        "kind": ["a", "b", "a"],
        "sku": ["1", "2", "3"],
        "title": ["Hüte", "Schuhe", "Stiefel"],
        "price": [1, 2, 3],
    }
)
BY_KEY: dict[str, Any] = {
    "id": "sku",
    "text": "{title} ({price})",
    "columns": "price",
    "model": "hash://16",
    "devices": "cpu",
    "quiet": True,
}
GIVEN: dict[str, Any] = {"partition_by": "kind", **BY_KEY}
IN_FILES = [("a", "1", "Hüte (1)"), ("a", "3", "Stiefel (3)"), ("b", "2", "Schuhe (2)")]


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def embedded(output: str) -> list[tuple[Any, ...]]:
    return sorted(open_embeddings(output).lazy().select("partition", "id", "text").collect().rows())


def test_file_and_the_frame_of_its_rows_give_the_same_embeddings(tmp_path: Path) -> None:
    (tmp_path / "products.csv").write_bytes(FRAME.write_csv().encode("cp1252"))

    of_file = embed(Path("products.csv"), Path("of-file"), encoding="cp1252", **GIVEN)
    of_frame = embed(FRAME, "of-frame", **GIVEN)

    assert of_file.partitions_written == of_frame.partitions_written == 2
    assert of_file.texts_encoded == 3
    assert embedded("of-file") == embedded("of-frame") == IN_FILES


def test_mapping_of_frames_or_of_functions_is_embedded() -> None:
    frames = {"a": FRAME.lazy(), "b": lambda: FRAME}

    report = embed(frames, "of-frames", **BY_KEY)

    assert report.partitions_written == 2
    assert report.texts_encoded == 6


def test_frame_is_refused_for_the_output_of_a_file() -> None:
    FRAME.write_csv("products.csv")
    embed("products.csv", "out", **GIVEN)

    with pytest.raises(ConfigError, match=r"catalog '.*products.csv', and this run reads 'frame:"):
        embed(FRAME, "out", **GIVEN, force=True)


def test_frames_are_the_whole_catalog_only_where_they_name_it() -> None:
    frames = dict.fromkeys("abc", FRAME)
    shop = {"output": "whole", "catalog_name": "shop", **BY_KEY}
    for key in frames:
        embed({key: FRAME}, "pieces", **BY_KEY)

    assert len(embedded("pieces")) == 9

    embed(frames, **shop)
    with pytest.raises(
        DeletionRefused, match="2 of 3 partitions were removed from the source"
    ) as refused:
        embed({"a": FRAME}, removed_partitions="delete", **shop)

    copy = pickle.loads(pickle.dumps(refused.value))

    assert str(copy) == str(refused.value)
    assert copy.report == refused.value.report
    assert copy.report.partitions_skipped == 1

    embed({"a": FRAME, "b": FRAME}, removed_partitions="delete", **shop)

    assert len(embedded("whole")) == 6


def test_frames_are_refused_where_a_cluster_encodes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="frames of this process, and machines of a cluster"):
        embed({"a": FRAME}, tmp_path / "out", cluster="auto", **BY_KEY)
    assert not (tmp_path / "out").exists()


def test_frames_are_not_opened_to_find_removed_partitions() -> None:
    calls = list[str]()
    embed({"a": FRAME, "b": FRAME}, "out", catalog_name="shop", **BY_KEY)

    embed({"a": lambda: calls.append("a") or FRAME}, "out", catalog_name="shop", **BY_KEY)

    assert calls == ["a"]
    assert {key for key, *_ in embedded("out")} == {"a"}


@pytest.fixture
def failed() -> PartitionsFailed:
    """What is raised by a run of twelve refused partitions and one that is embedded."""
    refused = FRAME.with_columns(sku=pl.lit(None, pl.String))
    frames = {f"{number:02}": refused for number in range(12)} | {"z": FRAME}
    with pytest.raises(PartitionsFailed) as raised:
        embed(frames, "out", **BY_KEY)
    return raised.value


def test_failed_partitions_raise_after_the_others_are_published(failed: PartitionsFailed) -> None:
    assert len(failed.report.partitions_failed) == 12
    assert failed.report.partitions_written == 1
    assert len(embedded("out")) == 3


def test_error_names_ten_failed_partitions(failed: PartitionsFailed) -> None:
    message = str(failed)

    begin = "12 partitions failed (1 written, 0 up to date):\npartition '00', row "
    assert message.startswith(begin)
    assert message.endswith("\n… and 2 more in report.partitions_failed")


def test_error_comes_back_from_a_process_pool(failed: PartitionsFailed) -> None:
    copy = pickle.loads(pickle.dumps(failed))

    assert str(copy) == str(failed)
    assert copy.report == failed.report


def test_failed_partitions_are_only_reported_on_request() -> None:
    frames = {"bad": FRAME.with_columns(sku=pl.lit(None, pl.String)), "z": FRAME}

    report = embed(frames, "out", raise_on_failure=False, **BY_KEY)

    assert len(report.partitions_failed) == 1
    assert report.partitions_written == 1


@pytest.mark.parametrize(
    ("source", "settings", "says"),
    [
        (FRAME, {}, "one frame needs partition_by, the columns that divide it into partitions"),
        ({"a": FRAME}, {"partition_by": "kind"}, "which partition_by cannot divide. Leave it out"),
        (
            FRAME,
            {"partition_by": "kind", "id": "ean"},
            "no column 'ean'; its columns are 'kind', 'sku', 'title'",
        ),
        (FRAME, {"idd": "sku"}, "setting idd is unknown; there are alert_webhook, b_max"),
        (
            [{"id": 1}],
            {"partition_by": "kind"},
            "its rows are a builtins list, which is not a frame",
        ),
        ("nowhere", {}, "there is no such file or folder"),
        ("p.csv", {}, "is one file. Name the column that divides it into partitions"),
        (
            "p.csv",
            {"partition_by": "kind", "encoding": "cp-1252"},
            "encoding is 'cp-1252': the encoding 'cp-1252' is",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_names_that_the_function_has(
    source: Any, settings: dict[str, Any], says: str
) -> None:
    FRAME.write_csv("p.csv")
    with pytest.raises(ConfigError) as refused:
        embed(source, **{"output": "out", **settings}, model="hash://16")

    assert says in str(refused.value)
    assert " --" not in str(refused.value).partition("`surge-dagster")[0]
    assert not Path("out").exists()


def test_help_of_the_command_groups_its_settings(surge: Command) -> None:
    _, out, _ = surge("embed", "--help")
    groups = [line.split()[1] for line in out.splitlines() if line.startswith("╭─")]

    options = ["Catalog", "Texts", "Model", "Encoder", "Run", "Output"]
    assert groups == ["Arguments", "Options", *options]
