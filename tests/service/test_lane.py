"""A lane encodes all requests in bounded passes, drops those that are cancelled, and leaves none
without an answer."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
import weakref
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.service import lane as lane_module
from surge_dagster.service.errors import (
    LaneClosed,
    LaneDown,
    Overloaded,
    RequestTooLarge,
    TooLong,
    UnusableText,
)
from surge_dagster.service.lane import Encoded, Lane
from surge_dagster.service.promise import MARGIN, Promise
from surge_dagster.service.text_queue import Request, TextQueue
from tests.engine.encoder.conftest import column, faulty_workers
from tests.service.lanes import Clock, assert_encoded, open_lane, texts_of, until

__all__ = ["faulty_workers"]

pytestmark = pytest.mark.usefixtures("faulty_workers", "no_leaks")

NO_WORKER = r"^no worker encodes texts of space \S+ any more; the service's log says why$"


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), max_size=8), st.integers(1, 40)
)
def test_passes_take_every_text_once_in_order_and_as_many_as_fit(
    requests: list[list[int]], most: int
) -> None:
    queue, left = TextQueue(), list[tuple[Request, int, int]]()
    for sizes in requests:
        texts, ends = column(["text"] * len(sizes)), np.cumsum([0, *sizes])
        queue.append(
            Request(
                texts,
                ends,
                False,
                Encoded(np.empty((len(sizes), 1)), np.diff(ends), np.zeros(len(sizes), np.bool_)),
            )
        )
        left += [(list(queue)[-1], row, size) for row, size in enumerate(sizes)]
    while left:
        taken = [
            (part.request, row) for part in queue.take(most) for row in range(part.start, part.stop)
        ]
        assert taken and taken == [each[:2] for each in left[: len(taken)]]
        size = sum(each[2] for each in left[: len(taken)])
        assert size <= most or len(taken) == 1
        left = left[len(taken) :]
        assert not left or size + left[0][2] > most
        assert queue.tokens == sum(each[2] for each in left)
    assert len(queue) == 0


def hold(lane: Lane, path: Path) -> Future[Encoded]:
    """A request whose pass ends when `path` exists; returns once it is under way."""
    held = lane.accept([f"wait {path}"])
    until(lambda: not lane.waiting_tokens)
    return held


def test_small_requests_share_a_pass_and_a_large_one_spans_several(tmp_path: Path) -> None:
    texts = [texts_of("one", 3), texts_of("two", 5), texts_of("many", 40), texts_of("last", 1)]
    with open_lane(pass_tokens=64) as lane:
        held = hold(lane, tmp_path / "go")
        answers = [lane.accept(each) for each in texts]
        assert lane.waiting_tokens == 4 * 49
        assert lane.waiting_requests == 4
        (tmp_path / "go").touch()
        for each, answer in zip(texts, answers, strict=True):
            assert_encoded(answer.result(), each)
            assert answer.result().tokens.tolist() == [4] * len(each)
        assert_encoded(held.result(), [f"wait {tmp_path / 'go'}"])
        assert (lane.counts.passes, lane.counts.texts) == (1 + 4, 1 + 49), (
            "16 texts fit into a pass"
        )
        assert (lane.waiting_tokens, lane.waiting_requests, lane.is_alive) == (0, 0, True)


def test_cancelled_requests_are_never_computed(tmp_path: Path) -> None:
    with open_lane(pass_tokens=64) as lane:
        hold(lane, tmp_path / "go")
        first, gone, last = (lane.accept(texts_of(name, 20)) for name in ("first", "gone", "last"))
        assert gone.cancel()
        assert lane.waiting_tokens == 4 * 40
        (tmp_path / "go").touch()
        assert_encoded(first.result(), texts_of("first", 20))
        assert_encoded(last.result(), texts_of("last", 20))
        with pytest.raises(CancelledError):
            gone.result()
        assert lane.counts.texts == 1 + 40


def test_request_that_is_cancelled_half_way_gives_up_the_texts_that_no_pass_has_taken(
    tmp_path: Path,
) -> None:
    with open_lane(pass_tokens=64) as lane:
        large = [f"wait {tmp_path / 'go'}", *texts_of("large", 200)]
        gone = lane.accept(large)
        until(lambda: lane.waiting_tokens < 4 * 200)
        assert gone.cancel()
        assert lane.waiting_tokens == 0
        (tmp_path / "go").touch()
        assert_encoded(lane.accept(["next"]).result(), ["next"])
        assert 1 < lane.counts.texts < 20


def test_request_that_is_cancelled_while_its_tokens_are_counted_is_never_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_lane() as lane:
        count, gone = lane._counter.count, Future[Encoded]()

        def count_and_cancel(*arguments: Any) -> Any:
            gone.cancel()
            return count(*arguments)

        monkeypatch.setattr(lane._counter, "count", count_and_cancel)
        assert lane.accept(["gone"], answer=gone) is gone
        assert lane.waiting_requests == 0
        assert_encoded(lane.accept(["next"]).result(), ["next"])
        assert lane.counts.texts == 1


def test_answer_that_was_given_needs_no_garbage_collector() -> None:
    with open_lane() as lane:
        gc.disable()
        try:
            given = weakref.ref(answer := lane.accept(["red"]))
            answer.result()
            del answer
            lane.accept(["blue"]).result()  # the lane has let go of the first
            assert given() is None
        finally:
            gc.enable()


def promised(passes: int) -> Promise:
    """With passes of 64 tokens and 10 ms, for so many that wait."""
    return Promise(6_400.0, 64, MARGIN * 0.010 * (passes + 1) + 1e-6)


def test_request_is_refused_when_it_could_not_be_answered_in_time_and_accepted_ones_are_answered(
    tmp_path: Path,
) -> None:
    clock = Clock()
    with open_lane(promise=promised(3), clock=clock) as lane:
        hold(lane, tmp_path / "go")
        accepted = [lane.accept(texts_of(str(number), 16)) for number in range(3)]
        with pytest.raises(Overloaded, match="192 tokens wait") as refused:
            lane.accept(["one more"])
        assert refused.value.retry_after_seconds == pytest.approx(MARGIN * 0.01, rel=1e-3)
        with pytest.raises(RequestTooLarge, match="has 196 tokens or more, and at most 192"):
            lane.accept(texts_of("large", 49))
        assert lane.waiting_tokens == 192, "a refused request leaves nothing behind"
        accepted[1].cancel()
        accepted.append(lane.accept(texts_of("again", 16)))
        (tmp_path / "go").touch()
        for number in ("0", "2", "again"):
            assert_encoded(
                accepted[("0", "1", "2", "again").index(number)].result(), texts_of(number, 16)
            )
        assert_encoded(lane.accept(["now"]).result(), ["now"])


def test_pass_that_takes_too_long_counts_as_waiting_time(tmp_path: Path) -> None:
    clock = Clock()
    with open_lane(promise=promised(3), clock=clock) as lane:
        held = hold(lane, tmp_path / "go")
        clock.now += 5
        with pytest.raises(Overloaded) as refused:
            lane.accept(["late"])
        assert 5 < refused.value.retry_after_seconds < 5 * MARGIN
        (tmp_path / "go").touch()
        held.result()


def test_lane_learns_that_the_device_is_slower_and_that_it_no_longer_is(tmp_path: Path) -> None:
    clock = Clock()
    with open_lane(promise=promised(3), clock=clock) as lane:
        slow = [f"wait {tmp_path / 'go'}", *texts_of("slow", 15)]
        answer = lane.accept(slow, truncate=True)
        until(lambda: lane._computing_since is not None and lane._pass)
        clock.now += 5
        (tmp_path / "go").touch()
        answer.result()
        until(lambda: lane._tokens_per_second is not None)
        before = lane._tokens_per_second
        assert before is not None and before < 6_400
        lane.accept(texts_of("quick", 16)).result()  # which an idle lane accepts
        until(lambda: (lane._tokens_per_second or 0) > before)


def test_request_that_cannot_be_answered_in_time_is_refused_before_its_tokens_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("tokens were counted")

    with open_lane(promise=promised(3)) as lane:
        hold(lane, tmp_path / "go")
        monkeypatch.setattr(lane._counter, "count", fail)
        for texts in ([""] * 193, ["x" * 16 * 193], ["x" * 16 * 100] * 2):
            with pytest.raises(RequestTooLarge, match="at most 192"):
                lane.accept(texts, truncate=True)


def test_lane_is_not_alive_while_its_pass_hangs_or_its_worker_is_being_loaded(
    tmp_path: Path,
) -> None:
    clock = Clock()
    with open_lane(promise=promised(3), clock=clock) as lane:
        held = hold(lane, tmp_path / "go")
        clock.now += 0.3
        assert lane.is_alive
        clock.now += 0.1
        assert not lane.is_alive
        (tmp_path / "go").touch()
        held.result()
        assert lane.is_alive
        [worker] = lane.pool.dispatcher()._workers.values()
        worker.ready = False
        assert lane.pool.worker_pids and not lane.is_alive


def test_worker_that_is_stopped_is_known_and_replaced_before_a_request_comes() -> None:
    with open_lane(promise=promised(3), clock=time.monotonic, hang_timeout_seconds=3.0) as lane:
        lane.start()
        assert lane.is_alive
        [stopped] = lane.pool.worker_pids
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: not lane.is_alive)
        until(lambda: lane.is_alive and lane.pool.worker_pids != [stopped])
        assert lane.counts.texts == lane.counts.passes == 0, "of requests"
        assert_encoded(lane.accept(["next"]).result(), ["next"])


def test_requests_are_answered_when_the_worker_is_killed_under_them(tmp_path: Path) -> None:
    texts = [texts_of(str(number), 10) for number in range(12)]
    with open_lane(max_respawns=3) as lane:
        hold(lane, tmp_path / "go")
        answers = [lane.accept(each) for each in texts]
        [killed] = lane.pool.worker_pids
        os.kill(killed, signal.SIGKILL)
        (tmp_path / "go").touch()
        for each, answer in zip(texts, answers, strict=True):
            assert_encoded(answer.result(), each)
        assert lane.is_alive
        assert lane.pool.worker_pids != [killed]


def test_every_request_hears_that_the_pool_has_failed_for_good_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_lane(max_respawns=0) as lane:
        held = hold(lane, tmp_path / "go")
        answers = [lane.accept(texts_of(str(number), 30)) for number in range(4)]
        for pid in lane.pool.worker_pids:
            os.kill(pid, signal.SIGKILL)
        for answer in (held, *answers):
            with pytest.raises(LaneDown, match=NO_WORKER):
                answer.result()
        until(lambda: not lane.is_alive)
        assert re.search(r"worker \d+ on cpu ended: SIGKILL", caplog.text)
        with pytest.raises(LaneDown):
            lane.accept(["too late"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("die always", "the text ended every worker that tried it"),
        ("zero", "its vector has length 0.0000; expected 1"),
    ],
)
def test_text_without_a_vector_fails_its_own_request_alone(
    tmp_path: Path, text: str, reason: str
) -> None:
    with open_lane(pass_tokens=256) as lane:
        hold(lane, tmp_path / "go")
        before, failing, after = (
            lane.accept(texts) for texts in (["a"], ["b", text, "c"], ["d", "e"])
        )
        (tmp_path / "go").touch()
        assert_encoded(before.result(), ["a"])
        assert_encoded(after.result(), ["d", "e"])
        with pytest.raises(
            UnusableText, match=rf"row 1 of the request cannot be encoded: {reason}$"
        ) as refused:
            failing.result()
        assert refused.value.row == 1
        assert_encoded(lane.accept(["f"]).result(), ["f"])


def test_texts_longer_than_the_model_reads_are_refused_by_row_unless_they_may_be_cut() -> None:
    long = "x" * 1_024  # 257 tokens
    with open_lane() as lane:
        with pytest.raises(TooLong, match=r"256 tokens.*rows 1, 3") as refused:
            lane.accept(["short", long, "short", 2 * long])
        assert refused.value.rows == [1, 3]
        answer = lane.accept(["short", long], truncate=True).result()
        assert answer.truncated.tolist() == [False, True]
        assert answer.tokens.tolist() == [2, 256]
        assert_encoded(answer, ["short", long])
        with pytest.raises(UnusableText, match=r"row 1 .*surrogate"):
            lane.accept(["fine", "\ud800"])
        with pytest.raises(RequestTooLarge, match=r"row 0 .* bytes"):
            lane.accept(["x" * (lane_module.MOST_TEXT_BYTES + 1)], truncate=True)


def test_closed_lane_answers_what_it_accepted_within_the_drain_time_and_nothing_later(
    tmp_path: Path,
) -> None:
    with open_lane() as lane:
        answer = lane.accept(texts_of("drained", 100))
        lane.close(drain_seconds=60)
        assert_encoded(answer.result(timeout=0), texts_of("drained", 100))
        with pytest.raises(LaneClosed):
            lane.accept(["late"])
    with open_lane() as lane:
        unanswered = [hold(lane, tmp_path / "never"), lane.accept(["waits"])]
        lane.close()
        for each in unanswered:
            with pytest.raises(LaneClosed):
                each.result(timeout=0)
        assert not lane.is_alive
