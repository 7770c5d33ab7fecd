"""Each line of a batch is answered once, in its space, whatever happens to the service."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.errors import Cancelled, EncoderError
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store import open_store
from surge_dagster.service import batch_run
from surge_dagster.service.batches import Batch, Batches, BatchRequest
from surge_dagster.service.errors import Refusal
from surge_dagster.service.records import FileObject, PageQuery
from surge_dagster.service.spaces import LaneSettings
from tests.engine.encoder.conftest import faulty_workers
from tests.service.fake_spaces import FakeSpaces, vectors_of
from tests.waiting import until

__all__ = ["faulty_workers"]

QUERIES = "/v1/embeddings"
TOO_LONG = "x" * 2_000


@pytest.fixture
def spaces(tmp_path: Path) -> FakeSpaces:
    return served(tmp_path / "output")


def served(output: Path) -> FakeSpaces:
    """Return spaces whose output has the space."""
    spaces = FakeSpaces(open_store(output))
    claim_space(spaces.store, spaces.only.space)
    return spaces


@pytest.fixture
def batches(spaces: FakeSpaces, tmp_path: Path) -> Batches:
    """Batches that the test runs itself."""
    return Batches(spaces.as_served(), tmp_path / "batches", look_seconds=0.01)


@pytest.fixture
def working(batches: Batches) -> Iterator[Batches]:
    """Batches that a thread works off."""
    with batches:
        yield batches


def line(custom_id: str, text: str | list[str] = "a text", url: str = QUERIES, **body: Any) -> str:
    body = {"model": "current", "input": text} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def made(batches: Batches, lines: Sequence[str | bytes], task: Any = "document") -> Batch:
    content = b"\n".join(each.encode() if isinstance(each, str) else each for each in lines)
    file = batches.records.upload("in.jsonl", "batch", io.BytesIO(content))
    body = BatchRequest(input_file_id=file.id, endpoint=QUERIES, completion_window="24h")
    return batches.create(batches.records, body, task)


def run(batches: Batches, batch: Batch) -> Batch:
    batches.run(batches.records, batch.id)
    return batches.records.get(Batch, batch.id)


def ended(batches: Batches, batch: Batch) -> Batch:
    until(lambda: batches.records.get(Batch, batch.id).status != "in_progress")
    return batches.records.get(Batch, batch.id)


def lines_of(batches: Batches, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a file of results, by custom_id."""
    if file_id is None:
        return {}
    lines = [json.loads(each) for each in batches.records.content(file_id).read_text().splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines), "each line is answered once"
    return found


def vector(result: Any, row: int = 0) -> list[float]:
    return result["response"]["body"]["data"][row]["embedding"]


WRONG = [
    ("no json", "invalid_json", None),
    (b'{"custom_id": "\xff"}', "invalid_json", None),
    (line("b").replace('"method"', '"other"'), "missing_required_parameter", "method"),
    (line("b").replace('"b"', "3"), "invalid_value", "custom_id"),
    (line("b", url="/v1/chat/completions"), "invalid_value", "url"),
    (line("b", []), "invalid_value", "body.input"),
    (line("b", [1, 2]), "tokens_not_supported", "body.input"),  # pyright: ignore[reportArgumentType]
    (line("b", dimensions=7), "invalid_value", "dimensions"),
    (line("b", prompt="find: "), "unsupported_parameter", "prompt"),
    (line("b", model="hash://16"), "mismatched_model", "body.model"),
    (line("b", input_type="query"), "mismatched_task", "url"),
    (line("a"), "duplicate_custom_id", "custom_id"),
    (line("b", "x" * 3000), "request_too_large", None),
]


def test_wrong_lines_fail_the_batch_before_any_is_encoded(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "_LARGEST_LINE_BYTES", 2000)

    batch = made(batches, [line("a"), "", *(wrong for wrong, _, _ in WRONG), line("good")])

    assert batch.status == "failed"
    assert batch.errors is not None
    found = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert found == [(number, code, param) for number, (_, code, param) in enumerate(WRONG, 3)]


def test_not_every_wrong_line_of_many_is_named(batches: Batches) -> None:
    batch = made(batches, [line("a"), *["wrong"] * 1000])
    assert batch.errors is not None
    assert len(batch.errors.data) == 100


@pytest.mark.parametrize(("task", "prompt"), [("document", ""), ("query", "find: ")])
def test_lines_have_their_vectors_or_the_error_of_the_endpoint(
    batches: Batches, task: str, prompt: str
) -> None:
    lines = [line(str(number), ["short", "word " * number]) for number in range(5)]
    lines.append(line("long", ["short", TOO_LONG]))
    lines.append(line("cut", ["short", TOO_LONG], truncate=True))
    lines.append(line("small", "red", dimensions=8, encoding_format="base64"))

    batch = run(batches, made(batches, lines, task))

    output = lines_of(batches, batch.output_file_id)
    errors = lines_of(batches, batch.error_file_id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 8, "completed": 7, "failed": 1}
    assert list(output) == ["0", "1", "2", "3", "4", "cut", "small"]
    for number in range(5):
        assert vector(output[str(number)], 1) == vectors_of(["word " * number], prompt)[0]
    tokens = sum(1 + len(prompt + text) // 4 for text in ("short", "word word "))
    assert output["2"]["response"]["body"]["usage"]["prompt_tokens"] == tokens
    assert output["cut"]["response"]["headers"] == {"surge-truncated-rows": "1"}
    assert isinstance(vector(output["small"]), str)
    assert list(errors) == ["long"]
    assert errors["long"]["response"]["status_code"] == 400
    assert errors["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.usefixtures("faulty_workers")
@pytest.mark.parametrize(
    ("poison", "reason"),
    [("zero", "line 4, text 0: its vector has length 0"), ("die always", "line 4, text 0: ")],
)
def test_only_lines_near_a_text_that_cannot_be_encoded_have_its_error(
    spaces: FakeSpaces, tmp_path: Path, poison: str, reason: str
) -> None:
    spaces.settings = LaneSettings("cpu", backend="faults:FaultyBackend")
    batches = Batches(spaces.as_served(), tmp_path / "batches", lines_per_partition=2)
    texts = ["text 1", "text 2", "text 3", poison, "text 5"]

    lines = [line(text, text) for text in texts]

    batch = run(batches, made(batches, [*lines, *[""] * 4]))

    output = lines_of(batches, batch.output_file_id)
    errors = lines_of(batches, batch.error_file_id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 5, "completed": 3, "failed": 2}
    assert list(errors) == ["text 3", poison]
    for error in errors.values():
        assert error["response"]["body"]["error"]["code"] == "unusable_text"
        assert reason in error["response"]["body"]["error"]["message"]
    for text in ("text 1", "text 2", "text 5"):
        assert vector(output[text]) == vectors_of([text], "")[0]


def test_cancelled_batch_is_encoded_no_further(batches: Batches, tmp_path: Path) -> None:
    batch = made(batches, [line("a")])
    cancelled = batch.ended("cancelled")
    assert batches.records.end(cancelled)

    with pytest.raises(Cancelled):
        run(batches, batch)

    assert not batches.records.end(cancelled), "it ends once"
    assert not (tmp_path / "batches" / "scratch" / batch.id).exists()


def test_file_that_a_batch_reads_is_not_deleted(batches: Batches) -> None:
    batch = made(batches, [line("a")])
    with pytest.raises(Refusal, match="An open batch reads the file"):
        batches.records.delete_file(batch.input_file_id)

    batches.records.end(batch.ended("cancelled"))

    assert batches.records.delete_file(batch.input_file_id).deleted


def test_record_that_cannot_be_read_keeps_no_other_batch_waiting(
    working: Batches, tmp_path: Path
) -> None:
    assert not working.records.open_batches(), "its table is made"
    with sqlite3.connect(tmp_path / "batches" / "records.sqlite") as database:
        values = ("batch_0", "batch", "", 2**40, '{"status": "in_progress"}')
        database.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?)", values)

    batch = made(working, [line("a")])

    assert ended(working, batch).status == "completed"
    page = working.records.page(Batch, PageQuery())
    assert [each.id for each in page.data] == [batch.id]


def test_expired_records_are_removed_but_not_what_an_open_batch_reads(
    batches: Batches, tmp_path: Path
) -> None:
    open_batch = made(batches, [line("a")])
    ended_batch = run(batches, made(batches, [line("a")]))
    path = tmp_path / "batches" / "records.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET expires_at = 1")
    for content in (tmp_path / "batches" / "files").iterdir():
        os.utime(content, (1, 1))

    batches.records.remove_expired()

    [batch] = batches.records.page(Batch, PageQuery()).data
    [file] = batches.records.page(FileObject, PageQuery()).data
    assert batch.id == open_batch.id
    assert file.id == open_batch.input_file_id
    assert batches.records.content(file.id).exists()
    for gone in (ended_batch.input_file_id, ended_batch.output_file_id):
        assert gone is not None
        assert not batches.records.content(gone).exists()


def test_batch_whose_space_has_gone_fails(
    batches: Batches, spaces: FakeSpaces, tmp_path: Path
) -> None:
    batch = made(batches, [line("a")])
    other = FakeSpaces(open_store(tmp_path / "other"))
    claim_space(other.store, replace(spaces.only.space, query_prompt="").named("other"))
    spaces.store = other.store
    batch = run(batches, batch)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert "has no space" in batch.errors.data[0].message


def test_batch_whose_file_has_gone_fails(batches: Batches) -> None:
    batch = made(batches, [line("a")])
    batches.records.content(batch.input_file_id).unlink()
    assert run(batches, batch).status == "failed"


def test_batch_whose_vectors_are_damaged_is_encoded_anew(
    working: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = batch_run._read_rows
    failures = [OSError("Corrupt snappy compressed data")]

    def read_damaged(*arguments: Any) -> Iterator[tuple[np.ndarray, bool]]:
        if failures:
            raise failures.pop()
        return read(*arguments)

    monkeypatch.setattr(batch_run, "_read_rows", read_damaged)
    batch = ended(working, made(working, [line("a")]))

    assert batch.status == "completed"
    assert not failures


def test_batch_that_cannot_be_encoded_now_is_tried_again_after_the_others(
    working: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = LaneSettings.pool
    failures = [EncoderError("the workers do not start")] * 3

    def pool_later(settings: LaneSettings, *arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return pool(settings, *arguments, **options)

    monkeypatch.setattr(LaneSettings, "pool", pool_later)
    first = made(working, [line("a")])
    second = made(working, [line("a")])
    assert ended(working, first).status == "completed"
    assert ended(working, second).status == "completed"
    assert not failures


WORKER = """
import sys
import threading
from pathlib import Path
from surge_dagster.service.batches import Batches
from tests.waiting import until
from tests.service.test_batches import served

folder = Path(sys.argv[1])
with Batches(served(folder / "output").as_served(), folder / "batches") as batches:
    until(lambda: not batches.records.open_batches(), 600)
"""


@pytest.mark.processes
def test_batch_of_killed_processes_answers_each_line_once(batches: Batches, tmp_path: Path) -> None:
    count = 20_000
    batch = made(batches, [line(str(number), f"text {number}") for number in range(count)])
    command = [sys.executable, "-c", WORKER, tmp_path]
    generator = np.random.default_rng(7)

    def partitions() -> int:
        return len(list((tmp_path / "batches" / "scratch").rglob("*.parquet")))

    for _ in range(2):
        process = subprocess.Popen(command)
        least = min(partitions() + 1, 20)
        until(lambda least=least: partitions() >= least)
        threading.Event().wait(generator.uniform(0, 0.1))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert batches.records.open_batches(), "none of the killed processes has ended the batch"

    subprocess.run(command, check=True, timeout=200)

    output = lines_of(batches, batches.records.get(Batch, batch.id).output_file_id)
    assert list(output) == [str(number) for number in range(count)]
    for number in range(0, count, 997):
        assert vector(output[str(number)]) == vectors_of([f"text {number}"], "")[0]
