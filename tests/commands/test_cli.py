"""The command line: exit codes, messages without a stack trace, one JSON document at the end."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surge_dagster.commands.cli import COMMANDS
from surge_dagster.engine.output.current_space import write_current
from tests.command import EMBED, MODEL, Command
from tests.spaces import Spaces


def installed(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a process of its own."""
    command = [str(Path(sys.executable).with_name("surge-dagster")), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def catalog(surge: Command) -> Path:
    for key, rows in (("apples", 30), ("pears", 3), ("plums", 1)):
        surge.write(key, rows)
    return surge.root / "catalog"


def test_embed_then_verify_then_search(catalog: Path, surge: Command) -> None:
    first = installed(*EMBED, "--json", cwd=surge.root)
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout.splitlines()[-1])
    assert report["partitions_written"] == 3
    assert report["texts_encoded"] == 34

    again = surge.embed()
    assert again["partitions_skipped"] == 3
    assert again["texts_encoded"] == 0

    verified = surge.json("verify", catalog, "out", *MODEL, "--reencode", "all")
    assert verified["violations"] == []
    assert verified["vectors_compared"] == 34

    [hit] = surge.json("search", "pears number 2", "out", *MODEL, "-k", 1)["hits"]
    assert hit["id"] == "pears-2"


def test_search_marks_a_hit_whose_text_was_truncated(surge: Command) -> None:
    surge.write("a", 2, text=["boots", "shoes " * 1_000])
    surge.embed()

    boots, shoes = surge("search", "boots", "out", *MODEL)[1].splitlines()[::2]

    assert boots.endswith("a-0")
    assert shoes.endswith("a-1  (truncated: the model reads only a part)")


def test_embed_with_a_price_reports_its_cost(catalog: Path, surge: Command) -> None:
    report = surge.embed("--price-per-hour", 3600)

    assert report["cost"] == pytest.approx(report["run_seconds"])
    assert report["cost_per_million_texts"] == pytest.approx(1e6 * report["cost"] / 34)

    fresh = surge(*EMBED, "--price-per-hour", 3600)[1]

    assert re.search(r"^cost [\d.]+ at 3600 an hour$", fresh, re.MULTILINE)


def test_bad_partition_gives_exit_code_1_and_all_others_are_published(
    catalog: Path, surge: Command
) -> None:
    surge.write("nulls", 3, text=["a", None, "c"])
    report = surge.json(*EMBED, expected=1)
    [failed] = report["partitions_failed"]
    assert report["partitions_written"] == 3
    assert failed["key"] == "nulls"
    assert "row 1" in surge.printed
    assert "Traceback" not in surge.printed


def test_bad_rows_that_are_set_aside_are_counted_and_printed(catalog: Path, surge: Command) -> None:
    surge.write("nulls", 3, text=["a", None, "c"])
    report = surge.embed("--bad-rows", "set_aside")

    printed = surge("rejected", "out")[1]
    document = surge.json("rejected", "out", "--space", report["space"])

    assert report["rejected_rows"] == 1
    assert printed.splitlines() == [
        "nulls  row 1  id nulls-1  invalid: the text is null; every row needs one",
        f"{report['space']}: 1 row set aside",
    ]
    [partition] = document["partitions"]
    assert document["rejected_rows"] == partition["rejected_rows"] == 1
    assert [row["id"] for row in partition["rows"]] == ["nulls-1"]
    assert surge.json("verify", "catalog", "out")["violations"] == []
    assert surge.embed("--bad-rows", "set_aside")["partitions_skipped"] == 4


def test_rows_set_aside_that_are_not_listed_are_named(catalog: Path, surge: Command) -> None:
    surge.write("nulls", 3, text=["a", None, "c"])
    surge.embed("--bad-rows", "set_aside")
    shutil.rmtree(surge.space_json().with_name(".rejected"))

    code, _, complaint = surge("rejected", "out")

    assert code == 0
    assert "partition 'nulls': its list has 0 of 1 row set aside" in complaint


def test_removed_partition_is_named_and_left_out_of_a_search(catalog: Path, surge: Command) -> None:
    surge.embed()
    shutil.rmtree(catalog / "partition=plums")

    assert surge.embed()["partitions_removed"] == ["plums"]
    assert "1 partition removed from the source: 'plums'. Readers leave out" in surge.printed

    search = ("search", "plums number 0", "out", *MODEL, "-k", 40)
    found = {hit["key"] for hit in surge.json(*search)["hits"]}
    everything = {hit["key"] for hit in surge.json(*search, "--removed")["hits"]}
    assert found == {"apples", "pears"}
    assert everything == {"apples", "pears", "plums"}


def test_deletion_of_most_of_a_catalog_is_refused_with_exit_code_1(
    catalog: Path, surge: Command
) -> None:
    deleting = ("--removed-partitions", "delete")
    surge.embed()
    shutil.rmtree(catalog / "partition=plums")

    assert surge.embed(*deleting)["partitions_removed"] == ["plums"]

    for key in ("apples", "pears"):
        shutil.rmtree(catalog / f"partition={key}")
    surge.write("figs", 1)
    refused = surge.error(*EMBED, *deleting, expected=1)
    assert "2 of 3 partitions were removed from the source" in refused


def test_search_follows_a_switch_and_names_another_space_of_the_settings(
    three_spaces: Spaces, tmp_path: Path, surge: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three_spaces.copy_to(tmp_path)
    first, second, _ = made.names()
    write_current(made.store, first, seen=None)

    switched = surge.json("switch", "catalog", "output", "--model", "hash://24")
    assert switched["current"] == {"space": second, "previous": first, "number": 2}

    monkeypatch.setenv("SURGE_MODEL", "hash://16")
    found = surge.json("search", "b/7 b/7 b/7", "output", "-k", 1)

    assert f"searching the current space {second}" in surge.printed
    assert found["space"] == second
    assert [hit["id"] for hit in found["hits"]] == ["id-7"]


def test_no_control_character_of_data_is_printed(surge: Command) -> None:
    surge.write("a", 2, id=["\x1b[2J", "b"], text=["red \x1b[31m", "\x9b31m"])
    surge.write("%1B%5B2J", 2, id=["a", "a"])
    code, out, error = surge(*EMBED)
    assert code == 1
    assert "refused" in error
    code, found, _ = surge("search", "red", "out", *MODEL)
    assert code == 0
    assert "\\x1b[31m" in found
    assert not set("\x1b\x9b") & {*out, *error, *found}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("embed", "nowhere", "out", *MODEL), "there is no such file or folder"),
        (("embed", "empty", "out", *MODEL), "is empty"),
        (("embed", "catalog", "a-file", *MODEL), "Not a directory"),
        (("embed", "catalog", "a-file/below", *MODEL), "cannot write"),
        (("embed", "catalog", "out", "--model", "nobody/nothing"), "nobody/nothing"),
        (("embed", "catalog", "s3://bucket/x", *MODEL), "s3://bucket/x"),
        (("verify", "catalog", "out", *MODEL), "no embeddings"),
        (("verify", "catalog", "out", *MODEL, "--reencode", "some"), "--reencode"),
        (("embed", "--no-such-option"), "--no-such-option"),
        ((*EMBED, "--document-prompt", "\udcff"), "UTF-8"),
        (("search", "\udcff", "out", *MODEL), "UTF-8"),
        (
            ("embed", "catalog", "out", "--query", "SELECT 1"),
            "the setting query is for sources of BigQuery",
        ),
        (
            ("embed", "catalog", "out", "--updated-at", "x"),
            "the setting updated_at is for sources of BigQuery",
        ),
    ],
)
def test_wrong_usage_gives_exit_code_2_and_the_reason(
    catalog: Path, tmp_path: Path, surge: Command, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").write_text("")
    assert says in surge.error(*arguments)


def test_table_without_rows_is_told_to_give_no_partitions(tmp_path: Path, surge: Command) -> None:
    (tmp_path / "t.csv").write_text("id,text,category\n")

    surge.json("embed", "t.csv", "out", *MODEL, "--partition-by", "category")

    assert "the source 't.csv' has no rows, and so no partitions" in surge.printed


def test_errors_are_the_json_document_too(surge: Command) -> None:
    code, out, _ = surge("embed", "nowhere", "out", *MODEL, "--json")

    assert code == 2
    assert surge.printed == f"error: {json.loads(out)['error']}\n"


@pytest.mark.parametrize(
    ("ending", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)],
)
def test_stopped_run_keeps_what_is_encoded_and_says_how_to_continue(
    catalog: Path, surge: Command, ending: signal.Signals, code: int
) -> None:
    for number in range(300):
        surge.write(f"more-{number}", 2)
    # Through an interpreter that takes the signal, in case whoever runs the tests ignores it.
    listen = (
        "import signal as s; s.signal(s.SIGINT, s.default_int_handler); "
        "s.signal(s.SIGTERM, s.SIG_DFL)"
    )
    run = f"{listen}; from surge_dagster.commands.cli import main; main()"
    command = [sys.executable, "-c", run, *EMBED, "--b-min", "1"]
    with subprocess.Popen(command, cwd=surge.root, stderr=subprocess.PIPE, text=True) as running:
        while running.poll() is None and not list((surge.root / "out").glob("*/*.parquet")):
            time.sleep(0.01)
        running.send_signal(ending)
        error = running.stderr.read() if running.stderr else ""
    assert running.returncode == code, error
    assert "run the command again" in error
    assert surge.embed()["partitions_failed"] == []


def test_list_of_commands_needs_nothing_of_the_engine() -> None:
    listed = (
        "import sys; from surge_dagster.commands import cli; "
        "cli.app(['--help'], standalone_mode=False); "
        "assert not {'numpy', 'pyarrow', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", listed], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("command", ["", *COMMANDS, "catalog demo"])
def test_every_command_has_help(surge: Command, command: str) -> None:
    code, out, error = surge(*command.split(), "--help")
    assert code == 0, error
    assert f"Usage: surge-dagster {command}".strip() in " ".join(out.split())
