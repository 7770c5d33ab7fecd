"""The progress of a run, also within a SuperBatch and over the machines of a cluster."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import dataclass, field

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.run.events import Follower, Progress
from surge_dagster.engine.run.report import Action, Event, Failure, Receipt, RunReport
from surge_dagster.engine.run.run_memory import InFlight
from surge_dagster.engine.sources.partition import Partition
from tests.engine.runs import Output, in_memory, receipts
from tests.small_catalogs import numbered_rows


@dataclass
class IdleRun:
    """A `Run` that does what the test says."""

    report: RunReport = field(default_factory=RunReport)
    space: Space = field(default_factory=EncodingSpec("hash://16").resolve)
    in_flight: InFlight | None = None
    preparing: str = "the encoder is starting"
    published: set[str] = field(default_factory=set)

    def events(self) -> Generator[Event]:
        yield from ()


def partitions(keys: str) -> list[Partition]:
    return [Partition(key, "v", lambda: iter(()), lambda: "v", rows=100) for key in keys]


def receipt(key: str, action: Action) -> Receipt:
    return Receipt(key, action, "", 100, 16, 0, "", 0, "", "", "", "")


def test_progress_in_words_has_the_share_done_and_the_remaining_time() -> None:
    clock = iter([0.0, 8.0, 10.0, 20.0, 20.0, 31.0])
    run = IdleRun()
    follower = Follower(run, partitions("abcd"), lambda: next(clock))

    def line() -> str:
        return follower.progress().in_words()

    assert line() == "Progress: 0 of 4 partitions in 8 s; the encoder is starting"
    run.preparing = "2 machines at work"
    run.report.costs = Costs(texts_encoded=80)
    rate = "8 texts/s, about 40 s left"
    assert line() == f"Progress: 0 of 4 partitions, 80 of 400 texts, {rate}; 2 machines at work"

    run.in_flight = InFlight()
    run.in_flight.add(150)
    assert line() == "Progress: 0 of 4 partitions in 20 s; 150 in flight"
    run.in_flight.encoded = 50
    rate = "2 texts/s, about 2 min left"
    assert line() == f"Progress: 0 of 4 partitions, 50 of 400 texts, {rate}; 150 in flight"

    run.in_flight.encoded = 150
    run.in_flight.remove(150)
    for event in (receipt("a", "encoded"), receipt("b", "republished"), Failure("d", "bad")):
        follower.count(event)
    rate = "11 texts/s, about 4 s left"
    assert line() == f"Progress: 3 of 4 partitions, 350 of 400 texts, {rate}; 0 in flight"


def test_time_remains_as_for_other_partitions_if_the_rows_are_not_known() -> None:
    clock = iter([0.0, 30.0])
    listed = [*in_memory(dict.fromkeys("abcd", ()))]
    run = IdleRun()
    run.report.costs = Costs(texts_encoded=90)
    follower = Follower(run, listed, lambda: next(clock))
    follower.count(receipt("a", "encoded"))

    rate = "3 texts/s, about 90 s left if partitions are alike"
    expected = f"Progress: 1 of 4 partitions, 90 texts, {rate}; the encoder is starting"
    assert follower.progress().in_words() == expected


def test_progress_is_shown_while_a_superbatch_is_encoded() -> None:
    run = IdleRun()
    shown = threading.Event()

    def show(progress: Progress) -> None:
        if progress.texts == 40:
            shown.set()

    def events() -> Generator[Event]:
        run.in_flight = InFlight()
        run.in_flight.encoded = 40
        assert shown.wait(60), "before the SuperBatch is an event"
        yield from ()

    assert list(Follower(run, partitions("a")).follow(events(), show, 0.01)) == []


def test_total_is_unknown_if_the_source_does_not_know_all_rows() -> None:
    listed = [*partitions("a"), Partition("b", "v", lambda: iter(()), lambda: "v")]
    assert Follower(IdleRun(), listed).all_texts is None


def test_all_texts_of_a_run_are_done_at_its_end(output: Output) -> None:
    run = output.run(in_memory(dict.fromkeys("abc", numbered_rows("a", 60))))
    follower = Follower(run, partitions("abc"))
    assert len(receipts(follower.follow(run.events(), print, 60))) == 3
    assert follower.progress().texts == 180
    assert follower.progress().partitions == 3
