"""Tests of the run config: typed keys, and partitions selected by their state."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dagster.conftest import Ran, Workbench

NULL_TEXT = [("x", None)]


def test_unknown_keys_are_refused_before_anything_is_encoded(bench: Workbench) -> None:
    bench.fill("abc")
    bench.instance.add_dynamic_partitions("catalog", ["left the catalog"])

    ran = bench.embed_keys(keys=["a", "A", "left the catalog", "c"])

    assert not ran.success
    assert "does not have 2 keys" in ran.failure()
    assert "'A'" in ran.failure()
    assert "'left the catalog'" in ran.failure()
    assert "'c'" not in ran.failure()
    assert not list(bench.output.glob("*"))
    assert not ran.materialized()


def test_launch_with_an_empty_list_of_keys_is_refused(bench: Workbench) -> None:
    bench.write("a")

    ran = bench.embed_keys(keys=[])

    assert not ran.success
    assert "keys" in ran.failure()
    assert "at least 1 item" in ran.failure()


@pytest.mark.parametrize(
    ("options", "embedded"),
    [
        ({"select": "failed"}, {"bad"}),
        ({"keys": ["bad", "b", "c"], "select": "stale"}, {"b"}),
        ({"select": "missing"}, {"bad", "c"}),
        ({"keys": ["b", "c"], "select": "all", "force": True}, {"b", "c"}),
    ],
)
def test_state_selects_among_the_partitions_of_a_launch(
    bench: Workbench, options: dict[str, Any], embedded: set[str]
) -> None:
    bench.fill("ab")
    bench.write("bad", NULL_TEXT)

    assert not bench.refresh().success

    for key in ("a", "b", "bad"):
        bench.write(key, 5, version="v2")
    bench.write("c", 6)

    ran = bench.embed_keys(**options)

    assert ran.success
    assert set(ran.materialized()) == embedded


@pytest.fixture
def forced(bench: Workbench) -> Ran:
    """A forced run that encoded the three rows of a and failed for b, which has five rows now."""
    bench.write("a", 3)
    bench.write("b", NULL_TEXT)
    ran = bench.embed_keys(force=True)
    assert not ran.success
    bench.write("b", 5, version="v2")
    return ran


def test_forced_run_that_continues_another_encodes_only_the_rest(
    bench: Workbench, forced: Ran
) -> None:
    resumed = bench.embed_keys(forced.tags_again() | {"dagster/retry_number": "1"}, force=True)

    assert resumed.success
    assert resumed.metrics()["texts_encoded"] == 5


def test_first_attempt_of_a_forced_run_that_has_a_worklist_counts(bench: Workbench) -> None:
    retried = {"dagster/retry_number": "1"}
    unlisted = bench.embed_keys(force=True)
    bench.write("a", 3)
    bench.write("b", NULL_TEXT)

    first = bench.embed_keys(unlisted.tags_again() | retried, force=True)
    bench.write("b", 5, version="v2")
    second = bench.embed_keys(first.tags_again() | retried, force=True)

    assert not unlisted.success
    assert first.metrics()["texts_encoded"] == 3
    assert second.success
    assert second.metrics()["texts_encoded"] == 5


def test_forced_run_that_is_executed_again_as_a_whole_begins_anew(
    bench: Workbench, forced: Ran
) -> None:
    whole = bench.embed_keys(forced.tags_again(), force=True)

    assert whole.metrics()["texts_encoded"] == 8
