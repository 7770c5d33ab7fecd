"""Operations that are attempted again: which, how often and when, and that each attempt is counted and logged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.store.request_errors import RequestFailed
from surge_dagster.engine.store.retries import Retrier


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
def test_waits_have_jitter_and_the_third_failure_is_the_last(jitter: float, expected: list[float]) -> None:
    clock = Clock()
    attempt = Failing(busy(), busy(), busy(), busy())
    with pytest.raises(TransientError, match=r"PUT a failed \(503: SlowDown\) after 3 attempts"):
        clock.retrier(jitter).call("PUT a", attempt)
    assert (attempt.calls, clock.waits) == (3, expected)


def test_final_failure_is_not_tried_again() -> None:
    attempt = Failing(RequestFailed("403", "AccessDenied", retryable=False))
    clock = Clock()
    retrier = clock.retrier()
    with pytest.raises(TransientError, match=r"403: AccessDenied.*credentials"):
        retrier.call("PUT a", attempt)
    assert (attempt.calls, clock.waits, retrier.counts) == (1, [], {})


def test_exception_that_is_an_answer_is_passed_on() -> None:
    attempt = Failing(FileNotFoundError("a"))
    with pytest.raises(FileNotFoundError):
        Clock().retrier().call("GET a", attempt)
    assert attempt.calls == 1


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


class Calling:
    """An operation in its own thread, which may be a daemon, as the threads of Dagster's code server are."""

    def __init__(self, retrier: Retrier, attempt: Callable[[], object], *, daemon: bool = False) -> None:
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._call, args=(retrier, attempt), daemon=daemon)
        self._thread.start()

    def _call(self, retrier: Retrier, attempt: Callable[[], object]) -> None:
        try:
            retrier.call("PUT a", attempt)
        except BaseException as error:
            self._errors.append(error)

    def ended_by(self) -> BaseException | None:
        """What it raised, once it has ended."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._errors[0] if self._errors else None


def test_wait_ends_with_the_run_and_nothing_is_tried_again() -> None:
    retrier = Retrier("s3://b")
    over, failed = threading.Event(), threading.Event()
    view = retrier.until(over)
    attempt = Failing(*[busy()] * 3)

    def fail() -> str:
        failed.set()
        return attempt()

    calling = Calling(view, fail)
    assert failed.wait(60)
    over.set()
    assert type(calling.ended_by()) is Cancelled
    with pytest.raises(Cancelled):
        view.call("PUT b", attempt)
    assert (attempt.calls, retrier.counts) == (1, {})


@pytest.mark.parametrize("daemon", [False, True])
def test_missing_answer_is_given_up_when_the_run_is_over(daemon: bool) -> None:
    """A later request is not even sent."""
    over, under_way, opened = threading.Event(), threading.Event(), threading.Event()
    view = Retrier("s3://b").until(over).until(threading.Event())

    def silent() -> None:
        under_way.set()
        over.set()
        opened.wait(60)

    assert type(Calling(view, silent, daemon=daemon).ended_by()) is Cancelled
    assert under_way.is_set() and not opened.is_set()
    never = Failing()
    with pytest.raises(Cancelled):
        view.call("PUT b", never)
    assert never.calls == 0
    opened.set()


def test_wait_ends_with_the_first_of_several_events() -> None:
    run, reads = threading.Event(), threading.Event()
    clock = Clock()
    view = clock.retrier().until(run).until(reads)
    run.set()
    with pytest.raises(Cancelled):
        view.call("GET a", Failing(busy()))
    assert clock.waits == []


def test_runs_that_share_a_store_end_on_their_own() -> None:
    clock = Clock()
    retrier = clock.retrier()
    over = threading.Event()
    over.set()
    with pytest.raises(Cancelled):
        retrier.until(over).call("PUT a", Failing(busy()))
    assert retrier.until(threading.Event()).call("PUT a", Failing(busy())) == "done"
    assert (clock.waits, retrier.counts) == ([2.0], {"503": 1}), "counted for both"
