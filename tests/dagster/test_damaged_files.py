"""Published files that are damaged or cannot be read fail their partition, and damaged ones are
encoded again."""

from __future__ import annotations

import pytest

from tests.dagster.conftest import NAMES, Workbench, shown
from tests.dagster.test_failures import damage_when_published


def test_partition_with_damaged_footer_fails_and_is_encoded_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write("a", 50)
    bench.write("b", 50)
    with monkeypatch.context() as patch:
        damage_when_published(bench, patch, "b")
        ran = bench.refresh()
    check = ran.checks()[NAMES.run_check.name]

    assert not ran.success
    assert not check.passed
    assert "partition 'b': its published file is missing or damaged" in ran.failure()
    assert str(check.metadata["failed"].value).endswith("| `Run again: it is encoded again.` |")
    assert shown(bench) == ({"a"}, {"b"})

    fixed = bench.refresh()

    assert fixed.success
    assert set(fixed.materialized()) == {"b"}
    assert fixed.metrics()["texts_encoded"] == 50
    assert shown(bench) == ({"a", "b"}, set())


def test_file_that_is_not_on_record_and_damaged_is_encoded_again(bench: Workbench) -> None:
    bench.fill("ab", 50)
    bench.refresh()
    bench.instance.wipe_assets([NAMES.embeddings])
    with bench.file("b").open("r+b") as file:  # bytes of a page, whose checksum tells
        file.seek(600)
        file.write(b"\xff\xff\xff\xff")

    ran = bench.refresh()

    actions = {key: event.metadata["action"].value for key, event in ran.materialized().items()}

    assert ran.success
    assert actions == {"a": "adopted", "b": "encoded"}
