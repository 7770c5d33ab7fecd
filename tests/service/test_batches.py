"""Each line of a batch is answered once, in its space, whatever happens to the service and its
lanes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from starlette.testclient import TestClient

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service import batch_run
from surge_dagster.service import batches as batches_module
from surge_dagster.service.app import service_app
from surge_dagster.service.batch_lines import Batch
from surge_dagster.service.batches import Batches
from surge_dagster.service.errors import (
    ClientError,
    LaneClosed,
    LaneDown,
    Overloaded,
    SpaceLoading,
    UnknownSpace,
)
from surge_dagster.service.files import FileStore, Records
from surge_dagster.service.settings import ServiceSettings
from tests.service.batch_files import (
    DOCUMENTS,
    QUERIES,
    Spaces,
    ids,
    line,
    made,
    results,
    run,
    vector,
)
from tests.service.fake_spaces import LONGEST, FakeSpace, vectors_of
from tests.service.running import wait_until

TOO_LONG = "word " * (LONGEST + 1)


@pytest.fixture
def spaces() -> Spaces:
    return Spaces()


@pytest.fixture
def reopen(
    spaces: Spaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Batches]]:
    """Opens the folder of the test as a service that starts anew does; its batches run where the
    test says it."""
    opened = list[Batches]()
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
    monkeypatch.setattr(batches_module, "_AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(batch_run, "_LOOK_SECONDS", 0.001)


WRONG = [
    ("no json", "invalid_json", None),
    (b'{"custom_id": "\xff"}', "invalid_json", None),
    (
        json.dumps({"custom_id": "b", "url": QUERIES, "body": {}}),
        "missing_required_parameter",
        "method",
    ),
    (
        json.dumps({"custom_id": 3, "method": "POST", "url": QUERIES, "body": {}}),
        "invalid_value",
        "custom_id",
    ),
    (line("b", url="/v1/chat/completions"), "invalid_value", "url"),
    (line("b", []), "invalid_value", "input"),
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
    batch = run(
        batches, made(batches, [line("a"), "", *(wrong for wrong, _, _ in WRONG), line("good")])
    )
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None and batch.failed_at
    found = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert found == [(number, code, param) for number, (_, code, param) in enumerate(WRONG, 3)]
    assert "line 1, too" in next(
        each.message for each in batch.errors.data if each.code == "duplicate_custom_id"
    )
    assert spaces.documents.accepted == []


def test_very_many_blank_lines_end_with_the_work_and_before_the_first_request_they_are_refused(
    batches: Batches, spaces: Spaces
) -> None:
    with pytest.raises(ClientError, match="no request in its first 1,000 lines"):
        made(batches, [*[""] * 1_000, line("a")])
    few, many, checks = [""] * 999, [" "] * 10_000, list[int]()
    batch = made(batches, [*few, line("a"), *many, line("b"), *many])
    counted = partial(batches._change, batch.id)
    work = batch_run.BatchRun(
        batch, spaces.as_served(), batches.files, lambda: checks.append(1), counted
    )
    work.validate()
    assert len(checks) >= 20 and [len(group) for group in work._left()] == [2] and len(checks) >= 40
    assert run(batches, batch).request_counts.completed == 2


def test_not_every_wrong_line_of_many_is_named(batches: Batches) -> None:
    batch = run(batches, made(batches, [line("a"), *["wrong"] * 1000]))
    assert batch.errors is not None and len(batch.errors.data) == 100


@pytest.mark.parametrize("task", ["document", "query"])
def test_lines_that_fail_have_the_endpoints_error_and_the_others_their_vectors(
    batches: Batches, spaces: Spaces, task: Any
) -> None:
    texts = [
        TOO_LONG if number % 3 == 1 else "of " * number + "words" * number**2 for number in range(8)
    ]
    lines = [line(f"{number}", ["short", text]) for number, text in enumerate(texts)]
    batch = run(
        batches, made(batches, [*lines, line("cut", ["short", TOO_LONG], truncate=True)], task)
    )
    output, errors = results(batches, batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
        "completed",
        6,
        3,
    )
    assert ids(errors) == ["1", "4", "7"]
    url = QUERIES if task == "query" else DOCUMENTS
    alone = TestClient(service_app(spaces.as_served(), ServiceSettings()))
    refused = alone.post(url, json={"model": "current", "input": ["short", TOO_LONG]})
    for error in errors:
        assert (error["response"]["status_code"], error["response"]["body"]) == (
            400,
            refused.json(),
        )
    for answer in output[:-1]:
        prompt = "find: " if task == "query" else ""
        text = texts[int(answer["custom_id"])]
        assert vector(answer, 1) == vectors_of([text], prompt)[0]
        assert answer["response"]["body"]["usage"]["prompt_tokens"] == 1 + len(text.split())
    assert output[-1]["response"]["headers"] == {"surge-truncated-rows": "1"}
    assert all("headers" not in answer["response"] for answer in output[:-1])


class Killed(BaseException):
    """Ends the work as a killed process does: nothing catches it."""


def test_batch_that_is_killed_at_any_step_answers_each_line_once(
    reopen: Callable[[], Batches], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        line(f"{number}", TOO_LONG if number % 5 == 2 else f"text {number}") for number in range(8)
    ]
    steps = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps -= 1
            if steps == 0:
                raise Killed
            return call(*args, **kwargs)

        return step

    flushed: dict[int, int] = {}
    put = Records.put

    def flush(descriptor: int) -> None:  # without the disk's part, which takes most of the time
        status = os.fstat(descriptor)
        flushed[status.st_ino] = status.st_size

    def put_after_results(records: Any, record: Any) -> None:
        if isinstance(record, Batch):
            for kind, size in (("output", record.output_bytes), ("error", record.error_bytes)):
                assert (
                    not size
                    or flushed[batches.files.content(record.results_id(kind)).stat().st_ino] >= size
                )
        put(records, record)

    monkeypatch.setattr(os, "fsync", dying(flush))
    monkeypatch.setattr(Records, "put", put_after_results)
    for place, name in (
        (os, "truncate"),
        (Path, "rename"),
        (Path, "unlink"),
        (FileStore, "append"),
    ):
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
        assert sorted(ids(output) + ids(errors)) == sorted(f"{number}" for number in range(8)), (
            deaths
        )
        assert ids(errors) == ["2", "7"]
        assert all(
            vector(each) == vectors_of([f"text {each['custom_id']}"], "")[0] for each in output
        )
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
            "completed",
            6,
            2,
        )
    assert deaths > 25


WORKER = """
import sys
import time
from pathlib import Path
from surge_dagster.service.batches import Batches
from tests.service.fake_spaces import FakeSpaces

with Batches(FakeSpaces().as_served(), Path(sys.argv[1])) as batches:
    while batches._open():
        time.sleep(0.05)
"""


@pytest.mark.soak  # twenty processes start
def test_batch_of_killed_processes_answers_each_line_once(reopen: Callable[[], Batches]) -> None:
    batches = reopen()
    lines = [line(f"{number}", f"text {number}") for number in range(60_000)]
    batch = made(batches, lines)
    batches.close()

    def completed() -> int:
        return batches.records.get(batch.id).request_counts.completed

    generator = np.random.default_rng(7)
    kills, code = 0, None
    while code is None:
        process = subprocess.Popen([sys.executable, "-c", WORKER, batches.files.folder.parent])
        aim = completed() + int(generator.integers(0, 4000))
        while completed() <= aim and process.poll() is None:
            time.sleep(0.001)
        code = process.poll()
        if code is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    output, errors = results(batches, batches.records.get(batch.id))
    assert (ids(output), errors) == ([f"{number}" for number in range(60_000)], [])
    assert all(
        vector(output[row]) == vectors_of([f"text {row}"], "")[0] for row in range(0, 60_000, 997)
    )
    assert (code, kills > 10) == (0, True)


@pytest.mark.parametrize(
    "torn", [b'{"id":"batch_req_', b'{"id":"whole"}\n{"custom', b'{"id":"batch_req_' * 1000]
)
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_torn_last_line_is_cut_off(
    reopen: Callable[[], Batches], monkeypatch: pytest.MonkeyPatch, torn: bytes, is_cancelled: bool
) -> None:
    batches, keep = reopen(), batch_run.BatchRun._keep
    batch = made(batches, [line(f"{number}", f"text {number}") for number in range(12)])

    def keep_and_die(*args: Any) -> None:
        keep(*args)
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(batch_run.BatchRun, "_keep", keep_and_die)
        batches.run(batch.id)
    assert batches.records.get(batch.id).request_counts.completed == 4
    for kind in ("output", "error"):
        with batches.files.content(batch.results_id(kind)).open("ab") as file:
            file.write(torn)
    batches = reopen()
    output, errors = results(
        batches, batches.cancel(batch.id) if is_cancelled else run(batches, batch)
    )
    assert (ids(output), errors) == (
        [f"{number}" for number in range(4 if is_cancelled else 12)],
        [],
    )


@pytest.fixture
def working(spaces: Spaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Batches]:
    """Batches that a thread works off."""
    monkeypatch.setattr(batch_run, "_GROUP_TEXTS", 4)
    with Batches(spaces.as_served(), tmp_path / "batches") as batches:
        yield batches


def ended(batches: Batches, batch: Batch) -> Batch:
    wait_until(lambda: batches.records.get(batch.id).status in ("completed", "failed", "cancelled"))
    return batches.records.get(batch.id)


def test_cancelled_batch_keeps_what_is_answered_and_queued_ones_end_at_once(
    working: Batches, spaces: Spaces
) -> None:
    lines = [line(f"{number}") for number in range(40)]
    spaces.documents.late_failures = [LaneDown("a worker was lost")]
    assert ended(working, made(working, lines)).request_counts.completed == 40
    spaces.documents.holds = True
    running, queued = made(working, lines), made(working, lines)
    wait_until(lambda: spaces.documents.held.qsize() == batch_run._GROUPS)
    first, *others = [spaces.documents.held.get() for _ in range(batch_run._GROUPS)]
    first.set_result(spaces.documents.encoded(["a text"] * 4))
    wait_until(lambda: working.records.get(running.id).request_counts.completed == 4)
    cancelled = [working.cancel(batch.id) for batch in (queued, running)]
    assert [batch.status for batch in cancelled] == ["cancelled", "cancelled"]
    wait_until(lambda: all(each.cancelled() for each in others))
    (nothing, _), (output, errors) = (results(working, batch) for batch in cancelled)
    assert (nothing, ids(output), errors) == ([], ["0", "1", "2", "3"], [])


def test_file_that_a_batch_reads_is_not_deleted(working: Batches, spaces: Spaces) -> None:
    spaces.documents.holds = True
    batch = made(working, [line("a")])
    with pytest.raises(ClientError, match=f"{batch.id} reads the file") as refused:
        working.delete_file(batch.input_file_id)
    assert refused.value.status == 409
    working.cancel(batch.id)
    ended(working, batch)
    working.delete_file(batch.input_file_id)
    assert [*working.files.all()] == []


def test_batch_goes_on_by_itself_when_the_service_starts_again(
    spaces: Spaces, tmp_path: Path
) -> None:
    spaces.documents.holds = True
    lines = [line(f"{number}") for number in range(3)]
    with Batches(spaces.as_served(), tmp_path) as first:
        running, queued = made(first, lines), made(first, lines)
        wait_until(lambda: first.records.get(running.id).status == "in_progress")
        with pytest.raises(ConfigError, match="another service uses the folder"):
            Batches(spaces.as_served(), tmp_path)
    assert [each.status for each in first.records.all()] == ["in_progress", "validating"]
    spaces.documents.holds = False
    with Batches(spaces.as_served(), tmp_path) as second:
        for batch in (running, queued):
            assert ids(results(second, ended(second, batch))[0]) == ["0", "1", "2"]


def test_batch_stays_in_its_space_after_a_switch(
    batches: Batches, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = made(batches, [line("a", "red"), line("b", "red")])
    before, other = spaces.only, Spaces().only
    other.space = replace(other.space, name="other-space")
    monkeypatch.setattr(spaces, "find", lambda model: before if model == batch.model else other)
    output, _ = results(batches, run(batches, batch))
    assert [each["response"]["body"]["model"] for each in output] == [before.space.name] * 2
    assert made(batches, [line("a", "red")]).model == "other-space"


def test_batch_of_a_space_that_is_no_longer_served_fails_with_all_its_lines_named(
    batches: Batches, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = made(batches, [line(f"{number}") for number in range(10)])
    known = [spaces.only] * 4  # to check the lines, to divide them, and to send two groups
    monkeypatch.setattr(batch_run, "_GROUPS", 1)
    gone = UnknownSpace(batch.model or "", ["current"])

    def find(model: str) -> FakeSpace:
        if known:
            return known.pop()
        raise gone

    monkeypatch.setattr(spaces, "find", find)
    batch = run(batches, batch)
    output, errors = results(batches, batch)
    assert batch.errors is not None and [each.code for each in batch.errors.data] == [
        "model_not_found"
    ]
    assert (batch.status, sorted(map(int, ids(output) + ids(errors)))) == ("failed", [*range(10)])
    assert {each["error"]["code"] for each in errors} == {"model_not_found"} and len(output) == 8
    with pytest.raises(UnknownSpace):
        made(batches, [line("a")])


def test_batch_waits_as_long_as_a_lane_or_its_space_takes_nothing(
    working: Batches, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = [UnknownSpace("it", []), SpaceLoading("it is loaded", 0.01), UnknownSpace("it", [])]
    spaces.documents.failures = [Overloaded("full", 0.001), LaneDown("down"), LaneClosed("closed")]
    spaces.documents.late_failures = [LaneDown("down"), LaneClosed("closed"), LaneDown("down")]

    def find(model: str) -> FakeSpace:
        if model == "current":
            return spaces.only
        spaces.is_ready = not unknown
        if unknown:
            raise unknown.pop()
        return spaces.only

    monkeypatch.setattr(spaces, "find", find)
    batch = made(working, [line(f"{number}", f"text {number}") for number in range(10)])
    output, errors = results(working, ended(working, batch))
    assert (ids(output), errors) == ([f"{number}" for number in range(10)], [])
    assert not (spaces.documents.failures or spaces.documents.late_failures or unknown)


def test_batch_whose_space_is_loaded_lets_others_go_first(
    working: Batches, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(spaces.only, space=replace(spaces.only.space, name="other-space"))

    def find(model: str) -> FakeSpace:
        if model == other.space.name and is_loading:
            raise SpaceLoading("it is loaded", 0.01)
        return other if model in ("other", other.space.name) else spaces.only

    monkeypatch.setattr(spaces, "find", find)
    is_loading = True
    first, second = made(working, [line("a", model="other")]), made(working, [line("b")])
    assert ended(working, second).status == "completed"
    assert working.records.get(first.id).status == "validating"
    is_loading = False
    assert ended(working, first).status == "completed"


def test_queries_with_a_lane_of_their_own_go_there_only_while_nothing_else_waits(
    working: Batches, spaces: Spaces
) -> None:
    spaces.queries.waiting_tokens = 5
    batch = made(working, [line(f"{number}") for number in range(5)], "query")
    wait_until(lambda: working.records.get(batch.id).status == "in_progress")
    assert spaces.queries.accepted == []
    spaces.queries.waiting_tokens = 0
    assert ended(working, batch).request_counts.completed == 5
    assert [len(texts) for texts in spaces.queries.accepted] == [1] * 5
    assert spaces.documents.accepted == []


def test_queries_go_to_the_bulk_lane_where_documents_are_encoded_alike(
    batches: Batches, spaces: Spaces
) -> None:
    spaces.queries.space = spaces.only.space
    batch = run(batches, made(batches, [line(f"{number}") for number in range(5)], "query"))
    assert batch.request_counts.completed == 5
    assert [len(texts) for texts in spaces.documents.accepted] == [4, 1]
    assert spaces.queries.accepted == []


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_few_lines_of_a_large_file_are_held_at_a_time(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    batch, group_texts = (
        made(batches, [line(f"{number}") for number in range(count)]),
        min(count // 40, 500),
    )
    held, most, parse, keep = 0, 0, batch_run.parse_line, batch_run.BatchRun._keep

    def parsed(*args: Any) -> Any:
        nonlocal held, most
        held += 1
        most = max(most, held)
        return parse(*args)

    def kept(self: Any, answers: Sequence[Any]) -> None:
        nonlocal held
        held -= len(answers)
        keep(self, answers)

    monkeypatch.setattr(batch_run, "_GROUP_TEXTS", group_texts)
    monkeypatch.setattr(batch_run, "parse_line", parsed)
    monkeypatch.setattr(batch_run.BatchRun, "_keep", kept)
    assert run(batches, batch).request_counts.completed == count
    assert (held, most) == (0, batch_run._GROUPS * group_texts + 1)
