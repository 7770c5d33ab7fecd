"""Fixture `bench`: a small catalog, an output and a Dagster instance on disk; runs use real worker
processes."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from surge_dagster.config.settings import load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.run import report
from surge_dagster.engine.run.encoding import Pace
from surge_dagster.engine.run.events import Follower
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.store import open_store
from surge_dagster.orchestration.launch import config_of, job_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.resources import EncoderResource
from tests.dagster import private_dagster
from tests.dagster.dev_server import CHILD_PATH
from tests.dagster.postgres_fixtures import postgres as postgres
from tests.dagster.postgres_fixtures import postgres_bench as postgres_bench
from tests.dagster.postgres_fixtures import postgres_home as postgres_home
from tests.dagster.postgres_fixtures import recorded as recorded
from tests.dagster.private_dagster import close_databases, quick_databases
from tests.small_catalogs import DIMENSION, Rows, numbered_rows, write_partition

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NAMES = CatalogNames()
MODEL = f"hash://{DIMENSION}"
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
# The input of an asset with the embeddings of the current space.
INS = {"embeddings": dg.AssetIn(key=NAMES.embeddings, input_manager_key="embeddings_input")}
# What code locations load, by their settings: the same in all tests that begin with the same ones.
_DEFINITIONS: dict[str, dg.Definitions] = {}


@dataclass(frozen=True, slots=True)
class Ran:
    instance: dg.DagsterInstance
    run_id: str
    success: bool

    def _events(self, kind: dg.DagsterEventType) -> list[Any]:
        logged = self.instance.all_logs(self.run_id, of_type=kind)
        return [entry.dagster_event for entry in logged]

    def materialized(
        self, asset: dg.AssetKey = NAMES.embeddings
    ) -> dict[str | None, dg.AssetMaterialization]:
        """Return materializations by partition key, in the order they were stored, without that of
        the whole output, which ends a run."""
        found: dict[str | None, dg.AssetMaterialization] = {}
        for event in self._events(dg.DagsterEventType.ASSET_MATERIALIZATION):
            if event.asset_key == asset:
                found[event.partition] = event.step_materialization_data.materialization
        if asset.path[-1].startswith(("embeddings", "next_space")):
            found.pop(None, None)
        return found

    def sources(self) -> dict[str | None, str]:
        reported = self.materialized(NAMES.source_partitions)
        return {key: data_version(event) for key, event in reported.items()}

    def checks(self) -> dict[str, dg.AssetCheckEvaluation]:
        return {check.check_name: check for check in self.evaluations()}

    def evaluations(self) -> list[dg.AssetCheckEvaluation]:
        """The results of checks, of all assets."""
        events = self._events(dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        return [event.asset_check_evaluation_data for event in events]

    def metrics(self) -> dict[str, Any]:
        """Metadata of the run's own check: the run report; numbers that it leaves out are 0."""
        return defaultdict(int, values_of(self.checks()[NAMES.run_check.name]))

    def summary(self) -> str:
        """Return the line in which the run's own check sums it up."""
        return self.checks()[NAMES.run_check.name].description or ""

    def logged(self) -> list[str]:
        return [
            entry.user_message
            for entry in self.instance.all_logs(self.run_id)
            if entry.dagster_event is None
        ]

    def failure(self) -> str:
        event = self._events(dg.DagsterEventType.STEP_FAILURE)[-1]
        data = event.step_failure_data.user_failure_data
        return data.description if data else event.step_failure_data.error_display_string

    @property
    def run(self) -> dg.DagsterRun:
        """What Dagster has on record of it now."""
        [run] = self.instance.get_runs(dg.RunsFilter([self.run_id]))
        return run

    @property
    def will_retry(self) -> bool:
        """Whether Dagster launches it again."""
        return self.run.tags.get("dagster/will_retry") == "true"

    def tags_again(self) -> dict[str, str]:
        """The tags that Dagster gives a run which executes this one again."""
        of_runs = {"dagster/parent_run_id": self.run_id, "dagster/root_run_id": self.run_id}
        return {**self.run.tags, **of_runs}

    def count(self, kind: dg.DagsterEventType) -> int:
        return len(self._events(kind))


@dataclass(frozen=True, slots=True)
class Tick:
    """What a tick requested, why it requested nothing, and the cursor of a sensor."""

    run_requests: list[dg.RunRequest]
    skip_message: str
    cursor: str | None = None


@dataclass(slots=True)
class Workbench:
    """One catalog, one output, one instance; the sensor's clock is `ahead` of the time."""

    root: Path
    instance: dg.DagsterInstance
    settings: dict[str, Any] = field(default_factory=dict)
    ahead: timedelta = timedelta()

    @property
    def catalog(self) -> Path:
        return self.root / "catalog"

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def definitions(self) -> dg.Definitions:
        """The definitions that a code location loads with the current settings; its paths are
        relative to `root`."""
        given = {"source": "catalog", "output": "output", "model": MODEL}
        settings = load_settings(**given | self.settings)
        # JSON leaves out secrets, and whether a value is the default or was given
        given_names = sorted(settings.model_fields_set)
        webhook = self.settings.get("alert_webhook")
        name = f"{settings.model_dump_json()} {given_names} {webhook}"
        if name not in _DEFINITIONS:
            _DEFINITIONS[name] = embedding_catalog(settings)
        return _DEFINITIONS[name]

    def write(self, key: str, rows: Rows | int = 3, version: str = "v1") -> None:
        if isinstance(rows, int):
            rows = numbered_rows(key, rows)
        write_partition(self.catalog, key, rows, version=version)

    def fill(self, keys: Iterable[str], rows: int = 3) -> None:
        for key in keys:
            self.write(key, rows)

    @property
    def space(self) -> str:
        [space] = list_spaces(open_store(self.output))
        return space.name

    def file(self, key: str) -> Path:
        [path] = self.output.glob(f"*/{key}.parquet")
        return path

    def run(
        self,
        job: str,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Ran:
        return execute(self.instance, self.definitions.resolve_job_def(job), config, tags)

    def materialize(
        self, config: Mapping[str, Any], tags: Mapping[str, str], *assets: dg.AssetKey
    ) -> Ran:
        """Materialize assets in this process, `embeddings` where none is named, like the UI's
        button."""
        job = self.definitions.resolve_implicit_global_asset_job_def()
        return execute(
            self.instance, job, config, tags, asset_selection=assets or [NAMES.embeddings]
        )

    def run_downstream(self, *assets: dg.AssetsDefinition) -> Ran:
        job = dg.define_asset_job("downstream", selection=dg.AssetSelection.assets(*assets))
        definitions = dg.Definitions.merge(
            self.definitions, dg.Definitions(assets=assets, jobs=[job])
        )
        return execute(self.instance, definitions.resolve_job_def("downstream"))

    def retry(self, ran: Ran) -> Ran:
        """Execute the run that Dagster launches after a failed run of a job."""
        assert ran.will_retry
        tags = ran.tags_again() | {"dagster/retry_number": "1"}
        return self.run(ran.run.job_name, ran.run.run_config, tags)

    def refresh(self, **options: Any) -> Ran:
        """Launch `catalog_refresh`."""
        return self.run("catalog_refresh", config_of(NAMES.refresh_op, options))

    def embed_keys(self, tags: Mapping[str, str] | None = None, **options: Any) -> Ran:
        """Launch `embed_partitions` from its launchpad: no partition is chosen, the config names
        them."""
        return self.run("embed_partitions", config_of(NAMES.embeddings_op, options), tags)

    def embed(self, first: str, last: str, *, backfill: str | None = None, **options: Any) -> Ran:
        """Launch a range of partitions of the asset, like the UI."""
        tags = range_tags(first, last)
        if backfill:
            tags["dagster/backfill"] = backfill
        config = config_of(NAMES.embeddings_op, options) if options else {}
        return self.materialize(config, tags)

    def tick(self, sensor: str = NAMES.sensor, cursor: str | None = None) -> Tick:
        definitions = self.definitions
        repository = definitions.get_repository_def()
        return evaluate(self.instance, repository, definitions.resources, sensor, cursor)

    def scheduled(self) -> Tick:
        """A tick of the nightly schedule."""
        schedule = self.definitions.get_repository_def().get_schedule_def(NAMES.schedule)
        with dg.build_schedule_context(
            self.instance, resources=self.definitions.resources
        ) as context:
            return tick_of(schedule.evaluate_tick(context))

    def nightly(self) -> Ran:
        [request] = self.scheduled().run_requests
        return self.run(NAMES.refresh_job, request.run_config, request.tags)

    def later(self, **time: float) -> Tick:
        self.ahead += timedelta(**time)
        return self.tick()

    def launch(self, found: Tick) -> list[Ran]:
        return [self.run("embed_partitions", r.run_config, r.tags) for r in found.run_requests]

    def pretend(self, found: Tick, status: dg.DagsterRunStatus) -> list[dg.DagsterRun]:
        return [
            self.pretend_run("embed_partitions", status, tags=each.tags, run_config=each.run_config)
            for each in found.run_requests
        ]

    def sources(self) -> dict[str, str]:
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION
        tag = "dagster/data_version"
        storage = self.instance.event_log_storage
        found = storage.get_latest_tags_by_partition(NAMES.source_partitions, kind, [tag])
        return {key: tags[tag] for key, tags in found.items()}

    def ask(self, query: str) -> dict[str, Any]:
        return private_dagster.ask_graphql(self.instance, query)

    def pretend_run(self, job: str, status: dg.DagsterRunStatus, **how: Any) -> dg.DagsterRun:
        definition = self.definitions.resolve_job_def(job)
        failed = status is dg.DagsterRunStatus.FAILURE
        begun = dg.DagsterRunStatus.STARTED if failed else status
        run = self.instance.create_run_for_job(
            definition, status=begun, remote_job_origin=private_dagster.origin_of_job(job), **how
        )
        if failed:
            self.instance.report_run_failed(run)
        return run


def execute(
    instance: dg.DagsterInstance,
    job: dg.JobDefinition,
    config: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    **how: Any,
) -> Ran:
    result = job.execute_in_process(
        instance=instance,
        run_config={**(config or {}), **QUIET},
        tags=dict(tags or {}),
        raise_on_error=False,
        **how,
    )
    return Ran(instance, result.run_id, result.success)


def run_op(bench: Workbench, op: dg.OpDefinition) -> Ran:
    return execute(bench.instance, job_of("job", op, ""))


def evaluate(
    instance: dg.DagsterInstance,
    repository: dg.RepositoryDefinition,
    resources: Mapping[str, Any] | None,
    sensor: str,
    cursor: str | None = None,
) -> Tick:
    """Evaluate a sensor as Dagster's daemon does."""
    with dg.build_sensor_context(
        instance, cursor, repository_def=repository, resources=resources
    ) as context:
        found = repository.get_sensor_def(sensor).evaluate_tick(context)
        return replace(tick_of(found), cursor=found.cursor)


def tick_of(found: Any) -> Tick:
    return Tick(list(found.run_requests or []), found.skip_message or "")


def stale_status(bench: Workbench, key: str, asset: dg.AssetKey = NAMES.embeddings) -> str:
    return private_dagster.stale_status(bench.instance, bench.definitions, asset, key)


def tick_for_a_minute(bench: Workbench) -> None:
    """Evaluate `lost_runs` as often as its daemon does, until a run that is dead now is declared
    lost."""
    cursor = None
    for _ in range(5):
        cursor = bench.tick(NAMES.lost_runs, cursor).cursor
        bench.ahead += timedelta(seconds=15)


def shown(bench: Workbench) -> tuple[set[str], set[str]]:
    """Return the partitions that the UI shows as materialized, and as failed."""
    keys = bench.instance.get_dynamic_partitions(NAMES.partitions_name)
    found = bench.instance.get_status_by_partition(NAMES.embeddings, keys, NAMES.partitions)
    by_status = defaultdict[str, set[str]](set)
    for key, status in (found or {}).items():
        if status:
            by_status[status.value].add(key)
    return by_status["MATERIALIZED"], by_status["FAILED"]


def values_of(
    event: dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation,
) -> dict[str, Any]:
    return {name: value.value for name, value in event.metadata.items()}


def numbered_keys(count: int) -> list[str]:
    return [f"p{number:02}" for number in range(count)]


def data_version(event: dg.AssetMaterialization) -> str:
    return (event.tags or {})["dagster/data_version"]


def range_tags(first: str, last: str) -> dict[str, str]:
    """The tags of a run whose partitions were chosen in the UI."""
    return {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}


def options_of(request: dg.RunRequest) -> dict[str, Any]:
    """The config of the only op of a requested run."""
    [op] = request.run_config["ops"].values()
    return op["config"]


def requested(found: Tick) -> list[Any]:
    """The partition keys that each requested run names, None for all."""
    return [options_of(request)["keys"] for request in found.run_requests]


@pytest.fixture(scope="session", autouse=True)
def _databases_are_quick() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    with quick_databases():
        yield


@pytest.fixture(scope="session")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DAGSTER_HOME with the project's settings and with tables, whose creation takes a second or
    two."""
    home = tmp_path_factory.mktemp("dagster-home")
    (home / "dagster.yaml").write_text(yaml.safe_dump(_settings()))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.get_dynamic_partitions("catalog")
    close_databases()
    return home


@contextmanager
def workbench(root: Path, home: Path) -> Iterator[Workbench]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SURGE_CONFIG", "SURGE_SOURCE", "SURGE_OUTPUT", "SURGE_MODEL"):
            patch.delenv(name, raising=False)
        patch.setenv("PYTHONPATH", CHILD_PATH)
        patch.chdir(root)
        shutil.copytree(home, root / "home")
        with dg.DagsterInstance.from_config(str(root / "home")) as instance:
            made = Workbench(root, instance)
            patch.setattr(
                "surge_dagster.orchestration.runs.now", lambda: datetime.now(UTC) + made.ahead
            )
            yield made
    close_databases()


@pytest.fixture(scope="session")
def lasting_workers(cache_folder: Path) -> Iterator[None]:
    """Workers of the workbench's model until the last test; else each run starts its own."""
    with EncoderResource(model=MODEL).pool():  # pyright: ignore[reportCallIssue]
        yield


@pytest.fixture
def bench(tmp_path: Path, empty_home: Path, lasting_workers: None) -> Iterator[Workbench]:
    with workbench(tmp_path, empty_home) as made:
        yield made


def _settings() -> dict[str, Any]:
    """The project's settings; what a step prints is not recorded, which takes four processes for
    each run."""
    nothing = {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
    return yaml.safe_load((ROOT / ".dagster" / "dagster.yaml").read_text()) | {
        "compute_logs": nothing
    }


@pytest.fixture
def terminated(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are terminated when they report their first partition."""

    def interrupt(follower: Follower, event: object) -> None:
        if isinstance(event, Receipt):
            [run] = bench.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
            bench.instance.report_run_canceling(run)
            raise dg.DagsterExecutionInterruptedError

    monkeypatch.setattr(Follower, "count", interrupt)


@pytest.fixture
def slow_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every encode call takes three times as long as usual, and is worth a warning."""
    monkeypatch.setattr(Pace, "ratio", lambda pace, seconds, expected_seconds: 3.0)
    monkeypatch.setattr(report, "_WORTH_A_WARNING_SECONDS", 0.0)
