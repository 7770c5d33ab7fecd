"""A catalog in production over many nightly runs: each change is embedded once, and nothing else
grows or remains.

One nightly run is killed, during one the bucket goes down, and before one an operator launches
another model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import dagster as dg
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.current_space import space_of_readers
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.verify.verification import Violation, verify
from surge_dagster.orchestration.partition_keys import from_partition_key, to_partition_key
from tests.dagster.conftest import NAMES, Workbench, tick_for_a_minute
from tests.dagster.dev_server import eventually
from tests.dagster.moving_catalog import Moved
from tests.dagster.nightly_runs import Ended, Production
from tests.engine.store.object_server import ObjectServer

pytestmark = pytest.mark.processes

_HOURS_OF_TICKS = (7, 8, 8)
# Checks, the start and the end of a run, in the database that all runs share; the log of one run,
# in its own.
_ROWS_OF_A_RUN, _OWN_ROWS_OF_A_RUN = 8, 60


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of nightly runs and partitions, and the runs in which something fails."""

    nights: int
    partitions: int
    removed_partitions: str
    killed: int
    down: int
    model: int
    apart: bool  # whether every run is a process of its own, or the killed one alone


def test_three_nightly_runs_embed_exactly_what_is_due(
    bench: Workbench, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes half a minute: seven runs, each of which starts an encoder."""
    live_through(
        bench,
        object_server,
        monkeypatch,
        Plan(3, 40, "report", killed=2, down=3, model=3, apart=False),
    )


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_twenty_four_nightly_runs_embed_exactly_what_is_due(
    bench: Workbench, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes some twenty minutes: fifty runs, each a process that imports Dagster, and ten thousands
    of requests."""
    live_through(
        bench,
        object_server,
        monkeypatch,
        Plan(24, 2000, "delete", killed=9, down=14, model=18, apart=True),
    )


def live_through(
    bench: Workbench, server: ObjectServer, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(bench.root / "cache"))
    production = Production.begin(bench, server, removed_partitions=plan.removed_partitions)
    nights = Nights(production, plan)
    for night in range(1, plan.nights + 1):
        nights.live(night)
    unseen = {production.moving.appear() for _ in range(2)}
    assert production.tick(1), "requested, and never launched"
    require_true_statuses(production, plan)
    require_valid_spaces(production, nights, unseen)
    require_nothing_left_behind(production)
    if plan.apart:
        nights.finish()


class Nights:
    """One catalog's nightly runs, each checked when it ends.

    Attributes:
        due: catalog keys whose present content is in no file of the space yet.
        unreported: files that were published by a run that could not report them.
        asked: those that were due when the last night's run was launched.
        removed: catalog keys that were removed from the source and are not reported yet.
        moved_on: catalog keys that have changed since there is a second space, and so are not up to
            date in the first.
        shown_failed: catalog keys that were shown as failed at the end of a night; what is embedded
            of them is planned.
    """

    def __init__(self, production: Production, plan: Plan) -> None:
        self.production = production
        self.plan = plan
        self.due: set[str] = set()
        self.unreported = 0
        self.asked: set[str] = set()
        self.moved_on: set[str] = set()
        self.removed: set[str] = set()
        self.shown_failed: set[str] = set()
        self._published = 0
        self._planned = 0
        self._runs = 0

    def live(self, night: int) -> None:
        """A day and its nightly run."""
        production, moving = self.production, self.production.moving
        moved = moving.move() if night > 1 else moving.fill(self.plan.partitions)
        self.due = (self.due | moved.versions) & moving.rows.keys() - moving.bad
        self.removed = (self.removed | moved.removed) - moving.rows.keys()
        if len(production.spaces) > 1:
            self.moved_on |= moved.versions | moved.removed
        registered, before, own_rows = (
            self._registered(),
            production.rows_of_events(),
            production.rows_of_runs(),
        )
        self._published = self._planned = self._runs = 0
        for hours in _HOURS_OF_TICKS:
            for request in production.tick(hours):
                self._run_of_the_sensor(request)
        if night == self.plan.model:
            self._another_model()
        else:
            self._nightly(night)
        grown = production.rows_of_events() - before
        assert (
            production.rows_of_runs() - own_rows <= grown.total() + _OWN_ROWS_OF_A_RUN * self._runs
        )
        self._require_a_reason_for_each_row(
            night, moved, grown, len(registered - self._registered())
        )
        assert not production.living() and not production.temporary_files()

    def finish(self) -> None:
        """Everything is fixed and complete, readers switch to the new space, and the next nightly
        run is idle."""
        self.production.moving.repair()
        self.due = self.production.moving.rows.keys() - self.production.stored(
            self.production.spaces[-1]
        )
        [request] = self.production.tick(1)
        self._run_of_the_sensor(request)
        [request] = self.production.requested_tonight()
        self._execute(NAMES.refresh_job, request)
        confirmed = {"ops": {NAMES.current_space_op: {"config": {"confirm": True}}}}
        assert self._execute(NAMES.switch_job, dg.RunRequest(run_config=confirmed)).code == 0
        assert (
            space_of_readers(self.production.settings().open_store()).name
            == self.production.spaces[-1]
        )
        before = self.production.rows_of_events()
        assert self.production.tick(1) == []
        [request] = self.production.requested_tonight()
        idle = self._execute(NAMES.refresh_job, request)
        assert idle.code == 0 and not idle.published
        assert (self.production.rows_of_events() - before).total() <= _ROWS_OF_A_RUN

    def _run_of_the_sensor(self, request: dg.RunRequest) -> None:
        there = (
            self.production.stored(self.production.spaces[-1])
            if self.production.spaces
            else set[str]()
        )
        ended = self._execute(NAMES.embed_job, request)
        assert ended.code == 0, ended.log
        named = set(self.production.named(request))
        published = {to_partition_key(key) for key in ended.published}
        assert published <= named and len(named - published) <= self.unreported, (
            "the others are adopted"
        )
        assert ended.published <= self.due - there, (
            "what is missing, and nothing that has only changed"
        )
        self.due -= ended.published

    def _nightly(self, night: int) -> None:
        [request] = self.production.requested_tonight()
        self.asked = set(self.due)
        half = max(2, len(self.due) // 2)
        if night == self.plan.killed:
            ended = self._execute(NAMES.refresh_job, request, killed_at=half)
            assert ended.code == -9 and ended.published < self.due, ended
            eventually(
                "the end of what the killed run had started", lambda: not self.production.living()
            )
            tick_for_a_minute(self.production.bench)
            [run] = self.production.bench.instance.get_runs(limit=1)
            assert run.status == dg.DagsterRunStatus.FAILURE
        elif night == self.plan.down:
            ended = self._execute(NAMES.refresh_job, request, down_at=half)
            assert ended.code == 1 and ended.published < self.due, ended
        else:
            ended = self._execute(NAMES.refresh_job, request)
            assert ended.code == (1 if self.production.moving.bad else 0), ended.log
            assert ended.published == self.due, "everything, and nothing twice"
        self.due -= ended.published

    def _another_model(self) -> None:
        """An operator launches it; sensor and schedule say that they do not."""
        production, server = self.production, self.production.server
        self.moved_on = set(self.due)
        production.bench.settings["model"] = "hash://24"
        with pytest.raises(ConfigError, match="a space is never begun unattended"):
            production.tick(0.1)
        old = server.objects()
        [request] = production.requested_tonight()
        assert self._execute(NAMES.refresh_job, request).code == 1 and server.objects() == old
        ended = self._execute(NAMES.refresh_job)
        assert ended.published == production.moving.rows.keys() - production.moving.bad
        assert len(production.spaces) == 2 and old.items() <= server.objects().items()
        assert space_of_readers(production.settings().open_store()).name == production.spaces[0]
        self.due.clear()

    def _execute(
        self,
        job: str,
        request: dg.RunRequest | None = None,
        *,
        killed_at: int = 0,
        down_at: int = 0,
    ) -> Ended:
        apart = self.plan.apart or bool(killed_at)
        ended = self.production.execute(
            job, request, apart=apart, killed_at=killed_at, down_at=down_at
        )
        self._runs += 1
        self._published += len(ended.published)
        self._planned += len(ended.published & self.shown_failed)
        return ended

    def _refusals(self, count: int) -> set[str]:
        """Return the partitions of the last observations, each of which reports a refusal."""
        records = self.production.bench.instance.fetch_observations(
            NAMES.embeddings, limit=max(1, count)
        ).records
        refused = [
            record.asset_observation.partition or ""
            for record in records[:count]
            if record.asset_observation
        ]
        assert all(refused)
        assert len(set(refused)) == len(refused)
        return set(map(from_partition_key, refused))

    def _named_in_plans(self) -> set[str]:
        """The partitions that a run said by their names it was to materialize: those that failed in
        one."""
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED
        storage = self.production.bench.instance.event_log_storage
        return set(
            map(
                from_partition_key,
                storage.get_latest_storage_id_by_partition(NAMES.embeddings, kind),
            )
        )

    def _registered(self) -> set[str]:
        return set(self.production.bench.instance.get_dynamic_partitions(NAMES.partitions_name))

    def _require_a_reason_for_each_row(
        self, night: int, moved: Moved, grown: Counter[tuple[str, str]], deleted: int
    ) -> None:
        """The event log grows by what a nightly run did, not by the size of the catalog or the
        number of runs."""
        sources = grown.pop(("ASSET_MATERIALIZATION", NAMES.source_partitions.path[-1]), 0)
        changes = grown.pop(("ASSET_OBSERVATION", NAMES.source_partitions.path[-1]), 0)
        removed = 0
        # else the nightly run does not come to it
        if night not in (self.plan.killed, self.plan.down, self.plan.model):
            removed = len(self.removed)
            self.removed.clear()
        assert sources == len(moved.versions) + removed + deleted
        assert changes == sources - len(moved.new)
        materialized = grown.pop(("ASSET_MATERIALIZATION", NAMES.embeddings.path[-1]), 0)
        planned = grown.pop(("ASSET_MATERIALIZATION_PLANNED", NAMES.embeddings.path[-1]), 0)
        refused = self._refusals(grown.pop(("ASSET_OBSERVATION", NAMES.embeddings.path[-1]), 0))
        if night == self.plan.killed:
            assert not refused
        elif night == self.plan.down:
            assert refused <= self.production.moving.bad  # what was read by then
        else:
            assert refused == self.production.moving.bad
        failed, again = refused, set[str]()
        # what was lost with the bucket is shown as failed, too, as far as it was begun
        if night == self.plan.down:
            failed = refused | (self._named_in_plans() - self.shown_failed)
            again = self.asked & self.shown_failed
            assert failed <= refused | self.asked
        assert len(failed) <= planned <= len(failed | again) + self._planned + self.unreported
        if night in (self.plan.killed, self.plan.down):
            assert materialized <= self._published + self.unreported
            self.unreported += self._published - materialized
        else:
            # An unreported file that changed before the next run is reported once, in its present
            # state.
            assert self._published <= materialized <= self._published + self.unreported
            assert planned >= len(failed) + self._planned
            self.unreported = 0
        self.shown_failed |= failed
        assert (
            grown.pop(("ASSET_MATERIALIZATION", NAMES.superbatches.path[-1]), 0)
            <= self._published + 4 * self._runs
        )
        assert grown.total() <= _ROWS_OF_A_RUN * self._runs, grown


def require_true_statuses(production: Production, plan: Plan) -> None:
    """What the UI shows of each partition is what the source and the bucket say."""
    moving = production.moving
    kept = (
        moving.removed.keys()
        if plan.removed_partitions == "report"
        else moving.removed.keys() & production.stored(production.spaces[-1])
    )
    known = moving.rows.keys() | kept
    embedded = production.stored(production.spaces[0]) | production.stored(production.spaces[-1])
    truth = {
        "all": known,
        "materialized": known & embedded - moving.bad,
        "failed": moving.bad,
        "in progress": set[str](),
    }
    assert production.statuses() == {
        name: set(map(to_partition_key, keys)) for name, keys in truth.items()
    }
    assert len(truth["failed"]) == 1 and len(truth["all"] - truth["materialized"]) == 3


def require_valid_spaces(production: Production, nights: Nights, unseen: set[str]) -> None:
    """The current space holds everything that it can; the one before it everything that has not
    moved since."""
    settings, moving = production.settings(), production.moving
    found: dict[str, dict[str, set[str]]] = {}
    spaces = {space.name: space for space in list_spaces(settings.open_store())}
    with EncoderPool(settings.encoding_spec()) as pool:
        for name in production.spaces:
            same = pool if name == pool.space.name else None
            found[name] = defaultdict(set)
            for seen in verify(
                settings.open_source(), settings.open_store(), spaces[name], pool=same
            ):
                if isinstance(seen, Violation):
                    found[name][seen.kind].add(seen.key)
    old, new = (found[name] for name in production.spaces)
    expected = {
        "missing": unseen,
        "refused": moving.bad,
        "orphan": moving.removed.keys() & production.stored(production.spaces[1]),
    }
    has_file = moving.bad & production.stored(production.spaces[1])
    expected |= {"refused": moving.bad - has_file, "stale": has_file}
    assert new == {kind: keys for kind, keys in expected.items() if keys}
    assert old.keys() <= {"missing", "stale", "refused", "source", "orphan"}
    assert (
        set().union(*old.values()) <= nights.moved_on | unseen | moving.bad | moving.removed.keys()
    )


def require_nothing_left_behind(production: Production) -> None:
    """No process, no upload, no staged segment, no slot and no run that is going on."""
    instance = production.bench.instance
    assert not production.living() and not production.temporary_files()
    names = {name.removeprefix("out/") for name in production.server.objects()}
    strange = {
        name
        for name in names
        if not name.startswith(tuple(production.spaces)) and name != "current_space.json"
    }
    assert not strange
    assert {run.status for run in instance.get_runs()} <= {
        dg.DagsterRunStatus.SUCCESS,
        dg.DagsterRunStatus.FAILURE,
    }
    for pool in instance.event_log_storage.get_concurrency_keys():
        slots = instance.event_log_storage.get_concurrency_info(pool)
        assert not slots.claimed_slots and not slots.pending_steps
