"""A lane encodes all requests in bounded passes, drops those that are cancelled, and leaves none
without an answer."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.service.errors import Refusal
from surge_dagster.service.lane import MARGIN, Encoded, Lane, Promise, promise_of
from tests.engine.encoder.conftest import faulty_workers
from tests.waiting import until

__all__ = ["faulty_workers"]

pytestmark = pytest.mark.usefixtures("faulty_workers", "no_leaks")


SPEC = EncodingSpec("hash://16")
BACKEND = "faults:FaultyBackend"


@contextmanager
def open_lane(
    *, pass_tokens: int = 64, promise: Promise | None = None, **options: Any
) -> Iterator[Lane]:
    """Yield a lane with a faulty backend, see `faults.py`; closed without draining."""
    pool = EncoderPool(SPEC, devices="cpu", backend=BACKEND, **options)
    lane = Lane(pool, pool.start(), pass_tokens, promise, recorded=pool.space)
    try:
        yield lane
    finally:
        lane.close()


def assert_encoded(encoded: Encoded, texts: list[str]) -> None:
    assert encoded.vectors.dtype == np.float32
    assert np.array_equal(encoded.vectors, hash_vectors(texts, 16))


def texts_of(name: str, count: int) -> list[str]:
    """Return texts of four tokens each."""
    return [f"{name:<8.8} {row:05}" for row in range(count)]


def hold(lane: Lane, path: Path) -> Future[Encoded]:
    """Accept a request whose pass ends when `path` exists; returns once it is under way."""
    held = lane.accept([f"wait {path}"])
    until(lambda: not lane.waiting_tokens)
    return held


def refused(code: str, answer: Any, *arguments: Any, **options: Any) -> Refusal:
    with pytest.raises(Refusal) as error:
        answer(*arguments, **options)
    assert error.value.code == code
    return error.value


def test_small_requests_share_a_pass_and_a_large_one_spans_several(tmp_path: Path) -> None:
    texts = [texts_of("one", 3), texts_of("two", 5), texts_of("many", 40), texts_of("last", 1)]
    with open_lane(pass_tokens=64) as lane:
        hold(lane, tmp_path / "go")
        answers = [lane.accept(each) for each in texts]
        assert lane.waiting_tokens == 4 * 49
        assert lane.waiting_texts == 49

        (tmp_path / "go").touch()

        for each, answer in zip(texts, answers, strict=True):
            assert_encoded(answer.result(), each)
            assert answer.result().tokens == 4 * len(each)
        assert lane.passes == 1 + 4, "16 texts fit into a pass"
        assert lane.texts == 1 + 49
        assert lane.waiting_tokens == 0


def test_text_larger_than_a_pass_is_encoded_by_itself() -> None:
    large = "x" * 400  # 101 tokens
    with open_lane(pass_tokens=64) as lane:
        assert_encoded(lane.accept(["a", large, "b"]).result(), ["a", large, "b"])
        assert lane.passes == 3


def test_cancelled_requests_are_never_computed(tmp_path: Path) -> None:
    with open_lane(pass_tokens=64) as lane:
        hold(lane, tmp_path / "go")
        gone = lane.accept(texts_of("gone", 20))
        last = lane.accept(texts_of("last", 20))
        assert gone.cancel()

        (tmp_path / "go").touch()

        assert_encoded(last.result(), texts_of("last", 20))
        with pytest.raises(CancelledError):
            gone.result()
        assert lane.texts == 1 + 20


def test_request_cancelled_half_way_gives_up_its_other_texts(tmp_path: Path) -> None:
    with open_lane(pass_tokens=64) as lane:
        gone = lane.accept([f"wait {tmp_path / 'go'}", *texts_of("large", 200)])
        until(lambda: lane.waiting_tokens < 4 * 200)
        assert gone.cancel()

        (tmp_path / "go").touch()

        assert_encoded(lane.accept(["next"]).result(), ["next"])
        assert 1 < lane.texts < 20


def test_request_cancelled_while_it_is_accepted_is_never_computed() -> None:
    with open_lane() as lane:
        gone = Future[Encoded]()
        gone.cancel()

        assert lane.accept(["gone"], future=gone) is gone

        assert_encoded(lane.accept(["next"]).result(), ["next"])
        assert lane.texts == 1


def promised(tokens: int) -> Promise:
    """A promise that so many unanswered tokens keep."""
    return promise_of(6_400.0, 64, MARGIN * tokens / 6_400 + 1e-6)


def test_request_that_would_be_late_is_refused_with_the_time_to_come_back(tmp_path: Path) -> None:
    with open_lane(promise=promised(256)) as lane:
        held = hold(lane, tmp_path / "go")
        under_way = sum(entry.tokens for entry in lane._pass)
        accepted = [lane.accept(texts_of(str(number), 16)) for number in range(3)]
        room = 256 - 3 * 64 - under_way

        late = refused("rate_limit_exceeded", lane.accept, texts_of("late", room // 4 + 1))

        assert 0 < late.retry_after_seconds <= MARGIN * 4 / 6_400 + 1e-3
        assert late.headers()["retry-after"] == "1"
        assert lane.waiting_tokens == 192, "a refused request leaves nothing"
        (tmp_path / "go").touch()
        for answer in (held, *accepted):
            answer.result()
        assert_encoded(lane.accept(["now"]).result(), ["now"])


def test_request_larger_than_the_promise_allows_is_refused_for_good() -> None:
    with open_lane(promise=promised(192)) as lane:
        error = refused("request_too_large", lane.accept, texts_of("large", 49))
    assert "has 196 tokens. At most 192" in str(error)


def test_time_before_a_request_is_read_counts() -> None:
    with open_lane(promise=promise_of(6_400.0, 64, 1.0)) as lane:
        late = time.monotonic() - 1.5
        error = refused("rate_limit_exceeded", lane.accept, ["late"], arrived_at=late)
        assert error.retry_after_seconds > 0.5

        in_time = lane.accept(["in time"], arrived_at=time.monotonic() - 0.5)

        assert_encoded(in_time.result(), ["in time"])


@pytest.mark.parametrize(("wanted", "promised"), [(10.0, 10.0), (None, 0.1)])
def test_quick_passes_lower_a_promise_that_was_raised(
    wanted: float | None, promised: float
) -> None:
    with open_lane(promise=promise_of(1.0, 64, wanted)) as lane:
        assert lane.promise is not None
        assert lane.promise.promised_seconds >= MARGIN * 2 * 64

        for _ in range(3):
            lane.accept(texts_of("full pass", 16)).result()
            until(lambda: not lane._pass)

        assert lane.promise.promised_seconds == promised


@pytest.mark.parametrize(
    "sizes", [[16, 16], [1, 1, 1, 1, 1]], ids=["too few passes", "small passes"]
)
def test_few_or_small_passes_lower_no_promise(sizes: list[int]) -> None:
    raised = promise_of(1.0, 64, 10.0)
    with open_lane(promise=raised) as lane:
        for size in sizes:
            lane.accept(texts_of("quick", size)).result()
            until(lambda: not lane._pass)

        assert lane.promise == raised


def test_promise_that_was_raised_is_measured_again_without_requests() -> None:
    with open_lane(promise=promise_of(1.0, 64, 10.0)) as lane:
        for passes in range(1, 4):
            lane.measure_if_idle()
            until(lambda passes=passes: lane.passes == passes and not lane._pass)

        assert lane.promise is not None
        assert lane.promise.promised_seconds == 10.0


def test_promise_that_was_raised_is_not_measured_while_a_query_waits(tmp_path: Path) -> None:
    with open_lane(promise=promise_of(1.0, 64, 10.0)) as lane:
        hold(lane, tmp_path / "go")

        lane.measure_if_idle()

        assert lane.waiting_texts == 0
        (tmp_path / "go").touch()


def test_promise_that_can_be_kept_is_not_measured_again() -> None:
    with open_lane(promise=promise_of(1e6, 64, 10.0)) as lane:
        lane.measure_if_idle()

        assert lane.waiting_texts == 0
        assert lane.passes == 0


def test_request_without_a_promise_is_refused_while_too_much_waits(tmp_path: Path) -> None:
    with open_lane(pass_tokens=64) as lane:
        hold(lane, tmp_path / "go")
        large = lane.accept(texts_of("large", 64 * 16))  # 64 passes
        last = lane.accept(["last"])

        full = refused("rate_limit_exceeded", lane.accept, ["late"])

        assert full.status == 429
        assert full.headers()["retry-after"] == "5"
        (tmp_path / "go").touch()
        assert_encoded(large.result(), texts_of("large", 64 * 16))
        assert_encoded(last.result(), ["last"])
        assert_encoded(lane.accept(["now"]).result(), ["now"])


def test_rate_follows_passes_and_never_passes_that_of_the_promise() -> None:
    with open_lane(promise=promise_of(1e9, 64, 10.0)) as lane:  # every pass is slower
        before = lane.expected_seconds(64)
        lane.accept(["slow"]).result()
        until(lambda: lane.expected_seconds(64) > before)

        slow = lane.expected_seconds(64)
        lane.accept(texts_of("full", 16)).result()
        until(lambda: lane.expected_seconds(64) != slow)

        assert lane._tokens_per_second <= 1e9


def test_only_full_passes_raise_the_rate() -> None:
    with open_lane(promise=promise_of(1.0, 64, 1_000.0)) as lane:  # every pass is faster
        lane._tokens_per_second = 0.5
        lane.accept(["small"]).result()
        assert lane._tokens_per_second == 0.5

        lane.accept(texts_of("full", 16)).result()
        assert lane._tokens_per_second > 0.5


def test_request_is_refused_in_time_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("it was tokenized")

    with open_lane(promise=promised(192)) as lane:
        hold(lane, tmp_path / "go")
        with monkeypatch.context() as patched:
            patched.setattr(lane, "_tokens_per_second", 1.0)
            patched.setattr(lane, "_tokenize", fail)

            refused("rate_limit_exceeded", lane.accept, ["late"])


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


def test_requests_are_refused_once_the_pool_has_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_lane(max_respawns=0) as lane:
        answers = [hold(lane, tmp_path / "go"), lane.accept(texts_of("waits", 30))]
        for pid in lane.pool.worker_pids:
            os.kill(pid, signal.SIGKILL)

        for answer in answers:
            error = refused("encoder_down", answer.result)
            assert "the service's log says why" in str(error)
        assert re.search(r"worker \d+ on cpu ended: SIGKILL", caplog.text)

        refused("encoder_down", lane.accept(["next"]).result)
        assert not lane.is_alive


def test_pool_that_cannot_start_is_not_started_again_by_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_lane() as lane:
        monkeypatch.setattr(EncoderPool, "has_failed", True)
        monkeypatch.setattr(lane.pool, "start", lambda: pytest.fail("it was started again"))

        refused("encoder_down", lane.accept(["a"]).result)

    assert "the service starts another one" in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("die always", "it ended every worker that tried it"),
        ("zero", "its vector has length 0.0000; expected 1"),
    ],
)
def test_text_without_a_vector_fails_only_its_own_request(
    tmp_path: Path, text: str, reason: str
) -> None:
    with open_lane(pass_tokens=256) as lane:
        hold(lane, tmp_path / "go")
        before = lane.accept(["a"])
        failing = lane.accept(["b", text, "c"])
        after = lane.accept(["d", "e"])
        (tmp_path / "go").touch()

        assert_encoded(before.result(), ["a"])
        assert_encoded(after.result(), ["d", "e"])
        error = refused("unusable_text", failing.result)
        assert f"Row 1 of the request cannot be encoded: {reason}" in str(error)


def test_texts_longer_than_the_model_reads_are_refused_by_row() -> None:
    long = "x" * 1_024  # 257 tokens
    with open_lane() as lane:
        error = refused("context_length_exceeded", lane.accept, ["short", long, "short", 2 * long])
    assert "256 tokens" in str(error)
    assert "have more: 1, 3." in str(error)


def test_texts_are_cut_if_the_request_allows_it() -> None:
    long = "x" * 1_024  # 257 tokens
    with open_lane() as lane:
        answer = lane.accept(["short", long], truncate=True).result()
    assert answer.truncated.tolist() == [False, True]
    assert answer.tokens == 2 + 256
    assert_encoded(answer, ["short", long])


def test_closed_lane_answers_what_it_accepted_within_the_drain_time() -> None:
    with open_lane() as lane:
        answer = lane.accept(texts_of("drained", 100))
        lane.close(drain_seconds=60)
        assert_encoded(answer.result(timeout=0), texts_of("drained", 100))


def test_closed_lane_refuses_what_comes_later_and_what_still_waits(tmp_path: Path) -> None:
    with open_lane() as lane:
        unanswered = [hold(lane, tmp_path / "never"), lane.accept(["waits"])]
        lane.close()

        for answer in unanswered:
            refused("shutting_down", answer.result, timeout=0)
        refused("shutting_down", lane.accept, ["late"])
        assert not lane.is_alive
