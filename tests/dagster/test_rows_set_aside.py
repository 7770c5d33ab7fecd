"""Bad rows that are set aside, in Dagster: in the events of their partitions, and in a check."""

from __future__ import annotations

import dagster as dg

from tests.dagster.conftest import Workbench, values_of
from tests.small_catalogs import Rows, numbered_rows, rewrite

NO_TEXT = "the text is null; every row needs one"


def with_nulls(key: str, rows: int, nulls: int) -> Rows:
    """Rows of which the first ones have no text."""
    return [
        *((f"bad-{row}", None) for row in range(nulls)),
        *numbered_rows(key, rows - nulls, start=nulls),
    ]


def test_event_of_a_partition_counts_and_shows_its_rows_set_aside(bench: Workbench) -> None:
    bench.settings["bad_rows"] = "set_aside"
    bench.write("p", with_nulls("p", 40, 25))

    event = bench.refresh().materialized()["p"]

    values = values_of(event)
    shown = values["rows_set_aside"].records
    assert values["rejected_rows"] == 25
    assert values["transient_rows"] == 0
    assert len(shown) == 20
    assert dict(shown[3].data) == {
        "place": "row 3",
        "id": "bad-3",
        "reason": NO_TEXT,
        "kind": "invalid",
    }


def test_share_of_rows_set_aside_above_the_setting_is_an_error(bench: Workbench) -> None:
    bench.settings |= {"bad_rows": "set_aside", "max_set_aside_share": 0.1}
    bench.write("few", with_nulls("few", 40, 4))
    bench.write("many", with_nulls("many", 40, 5))

    first = bench.refresh()
    bench.write("good")
    later = bench.refresh()

    for ran in (first, later, bench.run("catalog_check")):
        check = ran.checks()["few_rows_are_set_aside"]
        assert ran.success
        assert not check.passed
        assert check.severity == dg.AssetCheckSeverity.ERROR
        [line] = str(check.metadata["failed"].value).splitlines()[2:]
        reason = "5 of 40 rows (12.5%) were set aside because they are bad"
        assert line == f"| `many` | `{reason}` |"
        assert check.metadata["rejected_rows"].value == 9


def test_only_the_nightly_run_tries_transient_rows_again(bench: Workbench) -> None:
    bench.settings["refresh_stale"] = True
    bench.fill("ab")
    bench.refresh()
    rewrite(bench.file("a"), lambda table: table, transient_rows=1, rejected_rows=1)

    tick = bench.tick()
    nightly = bench.nightly()

    assert tick.run_requests == []
    assert "1 with rows that the nightly run tries again" in tick.skip_message
    assert set(nightly.materialized()) == {"a"}
