"""Files and batches: what OpenAI's client does with them, and that each line is answered once, whatever happens."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service import batch_run
from surge_dagster.service.app import service_app
from surge_dagster.service.batch_lines import Batch, BatchRequest
from surge_dagster.service.batches import Batches
from surge_dagster.service.lane import Encoded
from surge_dagster.service.refusals import LaneDown, Overloaded, SpaceLoading, TooLong, UnknownSpace
from surge_dagster.service.settings import ServiceSettings
from tests.service.fake_spaces import LONGEST, FakeLane, FakeSpace, FakeSpaces, vectors_of
from tests.service.running import serving, wait_until

QUERIES, DOCUMENTS = "/v1/embeddings", "/documents/v1/embeddings"
TOO_LONG = "word " * (LONGEST + 1)


@dataclass
class Lane(FakeLane):
    """Refuses what is too long, and fails its next requests, each in its own way."""

    waiting_tokens: int = 0
    failures: list[Exception] = field(default_factory=list)
    late_failures: list[Exception] = field(default_factory=list)

    def accept(self, texts: Sequence[str], *, truncate: bool = False) -> Future[Encoded]:
        if self.failures:
            raise self.failures.pop(0)
        rows = [row for row, text in enumerate(texts) if len(text.split()) > LONGEST]
        if rows and not truncate:
            raise TooLong(rows, LONGEST, LONGEST + 1)
        self.fails_later = self.late_failures.pop(0) if self.late_failures else None
        return super().accept(texts, truncate=truncate)


class Spaces(FakeSpaces):
    """Spaces with such lanes; `find` raises `unknown` where it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = Lane(self.only.queries.space, self.only.queries.promise)
        self.documents = Lane(self.only.space)
        self.only.queries, self.only.documents = self.queries, self.documents
        self.unknown: list[Exception] = []

    def find(self, model: str) -> FakeSpace:
        if self.unknown:
            raise self.unknown[0] if len(self.unknown) == 1 else self.unknown.pop(0)
        return super().find(model)


@pytest.fixture
def spaces() -> Spaces:
    return Spaces()


@pytest.fixture
def reopen(spaces: Spaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Batches]]:
    """Opens the folder of the test as a service that starts anew does; its batches run where the test says it."""
    opened = list[Batches]()
    monkeypatch.setattr(Batches, "_work_on", lambda self, batch: None)
    monkeypatch.setattr(batch_run, "_GROUP_TEXTS", 4)

    def reopen() -> Batches:
        if opened:
            opened.pop().close()
        opened.append(Batches(spaces.as_served(), tmp_path / "batches"))
        return opened[0]

    yield reopen
    opened.pop().close()


@pytest.fixture
def batches(reopen: Callable[[], Batches]) -> Batches:
    return reopen()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(batch_run, "_LOOK_SECONDS", 0.001)


def line(custom_id: str, text: str | list[str] = "a text", url: str = QUERIES, **body: Any) -> str:
    body = {"model": "current", "input": text} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def uploaded(batches: Batches, lines: Sequence[str | bytes]) -> str:
    content = b"\n".join(each.encode() if isinstance(each, str) else each for each in lines)
    return batches.files.upload("in.jsonl", "batch", io.BytesIO(content)).id


def made(batches: Batches, lines: Sequence[str | bytes], task: Any = "document") -> Batch:
    request = BatchRequest(input_file_id=uploaded(batches, lines), endpoint=QUERIES, completion_window="24h")
    return batches.create(request, task)


def run(batches: Batches, batch: Batch) -> Batch:
    batches.run(batches.records.get(batch.id))
    return batches.records.get(batch.id)


def results(batches: Batches, batch: Batch) -> tuple[list[Any], list[Any]]:
    """The lines of the output and of the error file."""
    found = []
    for id in (batch.output_file_id, batch.error_file_id):
        lines = batches.files.content(id).read_text().splitlines() if id else []
        assert not id or batches.files.get(id).bytes == batches.files.content(id).stat().st_size > 0
        found.append([json.loads(each) for each in lines])
    return found[0], found[1]


def ids(lines: Sequence[Any]) -> list[str]:
    return [each["custom_id"] for each in lines]


def vector(answer: Any, row: int = 0) -> list[float]:
    return numbers(answer["response"]["body"]["data"][row]["embedding"])


def numbers(found: str | list[float]) -> list[float]:
    return np.frombuffer(b64decode(found), "<f4").tolist() if isinstance(found, str) else found


@pytest.mark.parametrize(("root", "prompt"), [("/v1", "find: "), ("/documents/v1", "")])
def test_openais_client_gets_the_vectors_of_the_endpoint(
    spaces: Spaces, tmp_path: Path, root: str, prompt: str
) -> None:
    lines = [
        line("float", "red"),
        line("base64", "green", encoding_format="base64"),
        line("several", ["red", "", "blue"], dimensions=8),
        line("document", "red", DOCUMENTS),
        line("query", "red", DOCUMENTS, input_type="query"),
    ]
    with (
        serving(spaces.as_served(), batches=tmp_path / "batches") as url,
        openai.OpenAI(base_url=f"{url}{root}", api_key="none", max_retries=0) as client,
    ):
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        assert client.files.retrieve(file.id) == file
        assert (file.bytes, file.filename, file.purpose) == (len("\n".join(lines)), "in.jsonl", "batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", metadata={"of": "tests"}
        )
        assert (batch.model, batch.metadata) == (spaces.only.space.name, {"of": "tests"})
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert batch.request_counts is not None and batch.error_file_id is None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 5, 0)
        assert {each.id for each in client.files.list()} == {file.id, batch.output_file_id}
        assert [each.id for each in client.files.list(purpose="batch_output")] == [batch.output_file_id]
        text = client.files.content(batch.output_file_id or "").text
        answers = {each["custom_id"]: each for each in map(json.loads, text.splitlines())}
        for each, fields in ((json.loads(each), json.loads(each)["body"]) for each in lines):
            answer = answers.pop(each["custom_id"])
            assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
            is_document = root != "/v1" or each["url"] == DOCUMENTS
            side = fields.pop("input_type", None) or ("document" if is_document else "query")
            expected = client.embeddings.create(**fields, extra_body={"input_type": side})
            assert answer["response"]["body"]["model"] == expected.model
            assert len(answer["response"]["body"]["data"]) == len(expected.data)
            for row, found in enumerate(expected.data):
                assert vector(answer, row) == numbers(found.embedding)
        assert not answers
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match=file.id):
            client.files.retrieve(file.id)
        with pytest.raises(openai.ConflictError, match="is completed"):
            client.batches.cancel(batch.id)


WRONG = [
    ("no json", "invalid_json", None),
    (b'{"custom_id": "\xff"}', "invalid_json", None),
    (json.dumps({"custom_id": "b", "url": QUERIES, "body": {}}), "invalid_value", "method"),
    (json.dumps({"custom_id": 3, "method": "POST", "url": QUERIES, "body": {}}), "invalid_value", "custom_id"),
    (line("b", url="/v1/chat/completions"), "invalid_value", "url"),
    (line("b", []), "invalid_length", "input"),
    (line("b", cast(Any, [1, 2])), "tokens_not_supported", "input"),
    (line("b", dimensions=7), "invalid_value", "dimensions"),
    (line("b", prompt="find: "), "unsupported_parameter", "prompt"),
    (line("b", model="hash://16"), "mismatched_model", "body.model"),
    (line("a"), "duplicate_custom_id", "custom_id"),
    (line("b", "x" * 3000), "request_too_large", None),
]


def test_file_with_wrong_lines_fails_before_any_is_encoded(
    batches: Batches, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surge_dagster.service.batch_lines.MOST_LINE_BYTES", 2000)
    batch = run(batches, made(batches, [line("a"), "", *(wrong for wrong, _, _ in WRONG), line("good")]))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None and batch.failed_at
    found = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert found == [(number, code, param) for number, (_, code, param) in enumerate(WRONG, 3)]
    assert "line 1, too" in next(each.message for each in batch.errors.data if each.code == "duplicate_custom_id")
    assert spaces.documents.accepted == []
    empty = run(batches, made(batches, ["", " "]))
    assert empty.errors is not None and [error.code for error in empty.errors.data] == ["empty_file"]


def test_not_every_wrong_line_of_many_is_named(batches: Batches) -> None:
    batch = run(batches, made(batches, ["wrong"] * 1000))
    assert batch.errors is not None and len(batch.errors.data) == 100


@pytest.mark.parametrize("task", ["document", "query"])
def test_lines_that_fail_have_the_endpoints_error_and_the_others_their_vectors(
    batches: Batches, spaces: Spaces, task: Any
) -> None:
    texts = [TOO_LONG if number % 3 == 1 else f"text {number}" for number in range(10)]
    lines = [line(f"{number}", ["short", text]) for number, text in enumerate(texts)]
    batch = run(batches, made(batches, [*lines, line("cut", ["short", TOO_LONG], truncate=True)], task))
    output, errors = results(batches, batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 8, 3)
    assert ids(errors) == ["1", "4", "7"]
    url = QUERIES if task == "query" else DOCUMENTS
    alone = TestClient(service_app(spaces.as_served(), ServiceSettings()))
    refused = alone.post(url, json={"model": "current", "input": ["short", TOO_LONG]})
    for error in errors:
        assert (error["response"]["status_code"], error["response"]["body"]) == (400, refused.json())
    for answer in output[:-1]:
        prompt = "find: " if task == "query" else ""
        assert vector(answer, 1) == vectors_of([texts[int(answer["custom_id"])]], prompt)[0]
        assert answer["response"]["body"]["usage"]["prompt_tokens"] == 3
    assert output[-1]["response"]["headers"] == {"surge-truncated-rows": "1"}
    assert all("headers" not in answer["response"] for answer in output[:-1])


class Killed(BaseException):
    """Ends the work as a killed process does: nothing catches it."""


def test_batch_that_is_killed_at_any_step_answers_each_line_once(
    reopen: Callable[[], Batches], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line(f"{number}", TOO_LONG if number % 5 == 2 else f"text {number}") for number in range(8)]
    steps = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps -= 1
            if steps == 0:
                raise Killed
            return call(*args, **kwargs)

        return step

    monkeypatch.setattr(os, "fsync", dying(lambda descriptor: None))  # takes most of the time
    for place, name in ((os, "truncate"), (Path, "rename"), (Path, "unlink"), (Path, "touch")):
        monkeypatch.setattr(place, name, dying(getattr(place, name)))
    deaths, was_killed = 0, True
    while was_killed:
        batches = reopen()
        batch = made(batches, lines)
        was_killed, steps = False, deaths + 1
        try:
            batch = run(batches, batch)
        except Killed:
            was_killed, deaths = True, deaths + 1
            batches = reopen()
            batch = run(batches, batch)
        output, errors = results(batches, batch)
        assert sorted(ids(output) + ids(errors)) == sorted(f"{number}" for number in range(8)), deaths
        assert ids(errors) == ["2", "7"]
        assert all(vector(each) == vectors_of([f"text {each['custom_id']}"], "")[0] for each in output)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 6, 2)
    assert deaths > 25


@pytest.mark.parametrize("torn", [b'{"id":"batch_req_', b'{"id":"whole"}\n{"custom'])
def test_torn_last_line_is_cut_off(reopen: Callable[[], Batches], monkeypatch: pytest.MonkeyPatch, torn: bytes) -> None:
    batches, keep = reopen(), batch_run.BatchRun._keep
    batch = made(batches, [line(f"{number}", f"text {number}") for number in range(12)])

    def keep_and_die(*args: Any) -> None:
        keep(*args)
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(batch_run.BatchRun, "_keep", keep_and_die)
        batches.run(batch)
    progress = batches.records.get(batch.id).progress
    assert progress.line == 4
    for id in (progress.output_id, progress.error_id):
        with batches.files.content(id).open("ab") as file:
            file.write(torn)
    output, errors = results(batches, run(reopen(), batch))
    assert (sorted(map(int, ids(output))), errors) == ([*range(12)], [])
