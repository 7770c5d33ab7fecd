"""Published files that are damaged or cannot be read fail their partition, and damaged ones are
encoded again."""

from __future__ import annotations

import os

import pytest

from tests.dagster.conftest import NAMES, Workbench, shown, when_footers_are_checked


def test_partition_with_damaged_footer_fails_and_is_encoded_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(key: str) -> None:
        if key == "b":
            os.truncate(bench.file(key), bench.file(key).stat().st_size - 8)

    bench.fill("ab", 50)
    with monkeypatch.context() as patch:
        when_footers_are_checked(patch, cut_short)
        ran = bench.refresh()

    assert not ran.success
    assert "partition 'b': its published file is missing or damaged" in ran.failure()
    assert "| `Run again: it is encoded again.` |" in str(ran.metrics()["failed"])
    assert shown(bench) == ({"a"}, {"b"})

    fixed = bench.refresh()

    assert fixed.success
    assert set(fixed.materialized()) == {"b"}
    assert shown(bench) == ({"a", "b"}, set())


def test_file_that_is_not_on_record_and_damaged_is_encoded_again(bench: Workbench) -> None:
    bench.fill("ab", 50)
    bench.refresh()
    bench.instance.wipe_assets([NAMES.embeddings])
    with bench.file("b").open("r+b") as file:  # bytes of a page, which has a checksum
        file.seek(600)
        file.write(b"\xff\xff\xff\xff")

    ran = bench.refresh()

    actions = {key: event.metadata["action"].value for key, event in ran.materialized().items()}

    assert ran.success
    assert actions == {"a": "adopted", "b": "encoded"}
