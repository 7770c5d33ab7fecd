"""Operations that are attempted again: which, how often and when, and that each attempt is counted
and logged."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.store.request_errors import RequestFailed
from surge_dagster.engine.store.retries import Retrier
from surge_dagster.engine.support.waiting import in_background


class Clock:
    """Records the waits instead of waiting."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def retrier(self, jitter: float = 0.5) -> Retrier:
        return Retrier("s3://b", sleep=self.waits.append, jitter=lambda: jitter)


class Failing:
    """Raises the given failures, then answers."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self._failures:
            raise self._failures.pop(0)
        return "done"


def busy(cause: str = "503") -> RequestFailed:
    return RequestFailed(cause, "SlowDown", retryable=True)


def test_three_attempts_two_and_four_seconds_apart(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    retrier = clock.retrier()
    with caplog.at_level(logging.WARNING):
        assert retrier.call("PUT a", Failing(busy(), busy("reset"))) == "done"
    assert clock.waits == [2.0, 4.0]
    assert retrier.counts == {"503": 1, "reset": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "s3://b: PUT a failed (503: SlowDown); attempt 2 in 2.0 s",
        "s3://b: PUT a failed (reset: SlowDown); attempt 3 in 4.0 s",
    ]


@pytest.mark.parametrize(("jitter", "expected"), [(0.0, [1.5, 3.0]), (1.0, [2.5, 5.0])])
def test_waits_have_jitter_and_operation_is_given_up_after_three_failures(
    jitter: float, expected: list[float]
) -> None:
    clock = Clock()
    attempt = Failing(busy(), busy(), busy(), busy())
    with pytest.raises(TransientError, match=r"PUT a failed \(503: SlowDown\) after 3 attempts"):
        clock.retrier(jitter).call("PUT a", attempt)
    assert (attempt.calls, clock.waits) == (3, expected)


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (
            RequestFailed("403", "AccessDenied", retryable=False),
            pytest.raises(TransientError, match=r"403.*credentials"),
        ),
        (FileNotFoundError("a"), pytest.raises(FileNotFoundError)),
    ],
)
def test_final_failure_and_error_that_answers_the_request_are_not_retried(
    failure: Exception, raised: Any
) -> None:
    attempt, clock = Failing(failure), Clock()
    retrier = clock.retrier()
    with raised:
        retrier.call("GET a", attempt)
    assert (attempt.calls, clock.waits, retrier.counts) == (1, [], {})


def test_four_failures_in_a_row_mean_that_the_store_is_down() -> None:
    retrier = Clock().retrier()

    def lose() -> TransientError:
        with pytest.raises(TransientError) as caught:
            retrier.call("PUT a", Failing(busy(), busy(), busy()))
        return caught.value

    for _ in range(3):
        assert not isinstance(lose(), StoreUnavailable)
    retrier.call("PUT a", Failing())
    for _ in range(3):
        assert not isinstance(lose(), StoreUnavailable), "one success starts the count anew"
    assert isinstance(lose(), StoreUnavailable)


def test_each_kind_of_operation_is_counted_on_its_own() -> None:
    """A store that refuses every write may answer the read before each of them."""
    retrier = Clock().retrier()
    refused = [RequestFailed("403", "AccessDenied", retryable=False) for _ in range(4)]
    for number, failure in enumerate(refused, start=1):
        retrier.call("HEAD a", Failing())
        retrier.call("begin the upload of a", Failing())
        with pytest.raises(TransientError) as caught:
            retrier.call("PUT a", Failing(failure))
        assert isinstance(caught.value, StoreUnavailable) == (number == 4)


def test_wait_ends_with_the_run_and_nothing_is_tried_again() -> None:
    retrier = Retrier("s3://b")
    over, failed = threading.Event(), threading.Event()
    view = retrier.until(over)
    attempt = Failing(*[busy()] * 3)

    def fail() -> str:
        failed.set()
        return attempt()

    calling = in_background(lambda: view.call("PUT a", fail), "run")
    assert failed.wait(60)
    over.set()
    with pytest.raises(Cancelled):
        calling.result(60)
    with pytest.raises(Cancelled):
        view.call("PUT b", attempt)
    assert (attempt.calls, retrier.counts) == (1, {})


def test_missing_answer_is_given_up_when_the_run_is_over() -> None:
    """A later request is not even sent."""
    over, under_way, opened = threading.Event(), threading.Event(), threading.Event()
    view = Retrier("s3://b").until(over).until(threading.Event())

    def silent() -> None:
        under_way.set()
        over.set()
        opened.wait(60)

    with pytest.raises(Cancelled):
        in_background(lambda: view.call("PUT a", silent), "run").result(60)
    assert under_way.is_set() and not opened.is_set()
    never = Failing()
    with pytest.raises(Cancelled):
        view.call("PUT b", never)
    assert never.calls == 0
    opened.set()


def test_runs_that_share_a_store_end_on_their_own() -> None:
    clock = Clock()
    retrier = clock.retrier()
    over = threading.Event()
    over.set()
    with pytest.raises(Cancelled):
        retrier.until(over).call("PUT a", Failing(busy()))
    assert retrier.until(threading.Event()).call("PUT a", Failing(busy())) == "done"
    assert (clock.waits, retrier.counts) == ([2.0], {"503": 1}), "counted for both"
