"""Requests that are tried again: which, how often, how long after, and that all of it is counted and said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.store.retries import RequestFailed, Retrier, is_retryable, retry_after


class Clock:
    """Waits that are written down and not waited."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def retrier(self, jitter: float = 0.5) -> Retrier:
        return Retrier("s3://b", sleep=self.waits.append, jitter=lambda: jitter)


class Failing:
    """Fails as it is told, then answers."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self._failures:
            raise self._failures.pop(0)
        return "done"


def busy(cause: str = "503", retry_after_seconds: float | None = None) -> RequestFailed:
    return RequestFailed(cause, "SlowDown", retryable=True, status=503, retry_after_seconds=retry_after_seconds)


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
def test_waits_are_spread_so_that_writers_do_not_come_back_together(jitter: float, expected: list[float]) -> None:
    clock = Clock()
    clock.retrier(jitter).call("PUT a", Failing(busy(), busy()))
    assert clock.waits == expected


def test_the_store_says_how_long_to_wait() -> None:
    clock = Clock()
    clock.retrier(0.0).call("PUT a", Failing(busy("429", 17.0), busy("429", 1e6)))
    assert clock.waits == [17.0, 300.0], "but not for how long a run hangs"


def test_the_third_failure_is_the_last() -> None:
    clock = Clock()
    attempt = Failing(busy(), busy(), busy(), busy())
    with pytest.raises(TransientError, match=r"PUT a failed \(503: SlowDown\) after 3 attempts"):
        clock.retrier().call("PUT a", attempt)
    assert (attempt.calls, len(clock.waits)) == (3, 2)


def test_what_cannot_pass_is_not_tried_again() -> None:
    attempt = Failing(RequestFailed("403", "AccessDenied", retryable=False, status=403))
    clock = Clock()
    retrier = clock.retrier()
    with pytest.raises(TransientError, match=r"403: AccessDenied.*credentials"):
        retrier.call("PUT a", attempt)
    assert (attempt.calls, clock.waits, retrier.counts) == (1, [], {})


def test_an_answer_that_is_an_error_to_the_caller_is_passed_on() -> None:
    attempt = Failing(FileNotFoundError("a"))
    with pytest.raises(FileNotFoundError):
        Clock().retrier().call("GET a", attempt)
    assert attempt.calls == 1


def test_a_store_in_which_nothing_succeeds_any_more_is_down() -> None:
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


def test_requests_of_one_kind_say_nothing_of_those_of_another() -> None:
    """A store that refuses every write may answer who looks before each of them."""
    retrier = Clock().retrier()
    refused = [RequestFailed("403", "AccessDenied", retryable=False, status=403) for _ in range(4)]
    for number, failure in enumerate(refused, start=1):
        retrier.call("HEAD a", Failing(), kind="read")
        retrier.call("begin the upload of a", Failing(), kind="begin")
        with pytest.raises(TransientError) as caught:
            retrier.call("PUT a", Failing(failure), kind="write")
        assert isinstance(caught.value, StoreUnavailable) == (number == 4)


class Calling:
    """A request that goes on in a thread of its own, which may be a daemon, as those of Dagster's code server are."""

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


def test_a_wait_ends_with_the_run_and_nothing_is_tried_again() -> None:
    """Nobody would wait here for as long as the store asks for."""
    retrier = Retrier("s3://b")
    over = threading.Event()
    view = retrier.until(over)
    attempt = Failing(*[busy("503", 600.0)] * 3)
    calling = Calling(view, attempt)
    over.set()
    assert type(calling.ended_by()) is Cancelled
    with pytest.raises(Cancelled):
        view.call("PUT b", attempt)
    assert (attempt.calls, retrier.counts) == (2, {})


@pytest.mark.parametrize("daemon", [False, True])
def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_until_the_run_is_over(daemon: bool) -> None:
    """Within a second, of which the store knows nothing; a later request is not even sent."""
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


def test_what_is_asked_when_a_run_is_over_is_answered_by_a_store_that_lives() -> None:
    over = threading.Event()
    over.set()
    assert Retrier("s3://b").until(over).call("abort the upload of a", Failing()) == "done"


def test_a_wait_ends_with_whoever_stops_waiting_first() -> None:
    run, reads = threading.Event(), threading.Event()
    clock = Clock()
    view = clock.retrier().until(run).until(reads)
    run.set()
    with pytest.raises(Cancelled):
        view.call("GET a", Failing(busy()))
    assert clock.waits == []


def test_what_one_run_no_longer_wants_another_one_still_does() -> None:
    clock = Clock()
    retrier = clock.retrier()
    over = threading.Event()
    over.set()
    with pytest.raises(Cancelled):
        retrier.until(over).call("PUT a", Failing(busy()))
    assert retrier.until(threading.Event()).call("PUT a", Failing(busy())) == "done"
    assert (clock.waits, retrier.counts) == ([2.0], {"503": 1}), "counted for both"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 7 ", 7.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("²", None),
        ("-1", None),
        ("7.5", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 60.0),
        ("Thu, 01 Jan 99999 00:01:40 GMT", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, now=lambda: 40.0) == seconds


@pytest.mark.parametrize("code", ["BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"])
def test_a_body_that_came_damaged_or_too_slowly_may_pass(code: str) -> None:
    assert is_retryable(400, code)
    assert not is_retryable(400, "InvalidArgument")


@given(st.text(st.characters(max_codepoint=255)))  # as a header's bytes are read
def test_no_retry_after_is_an_error(value: str) -> None:
    asked = retry_after(value)
    assert asked is None or asked >= 0
