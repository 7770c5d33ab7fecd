"""The asset `embeddings`, its upstream assets, and the jobs that bring all or some of its
partitions up to date.

A run of the asset covers one range of partitions. The jobs cover the partitions that their config
names, or all of them. Dagster does not launch a partitioned asset without a range, so the jobs
execute an op that does the same work and logs the same events. The op also finds partitions that no
sensor has registered yet.

Dagster executes neither upstream asset. A run of `embeddings` reports the events of both; the
sensor reports the catalog too. `superbatches` is not a second output of that run's op: an op with a
partitioned and an unpartitioned asset makes backfills from the UI impossible.
"""
# Dagster reads annotations when it makes an asset or an op, so they must not be strings here.

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import dagster as dg

from surge_dagster.assets.checks import (
    log_result,
    outputs_without_result,
    run_check_results,
    run_checks,
)
from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.support.urls import to_uri
from surge_dagster.orchestration.asset_events import CODE_VERSION
from surge_dagster.orchestration.dagster_internals import longest_wait
from surge_dagster.orchestration.failures import (
    allow_run_retry,
    errors_as_failures,
    failure_of,
    is_passing,
    report_failures,
)
from surge_dagster.orchestration.heartbeats import executing
from surge_dagster.orchestration.launch import POOL, LaunchConfig, job_of, partition_keys_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome, SetAside, Truncation
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records import failed_on_record
from surge_dagster.orchestration.refresh import Refresh
from surge_dagster.orchestration.spaces import report_whole_output
from surge_dagster.resources import CatalogSource
from surge_dagster.resources.upstream_asset import asset_key

# Embeds in a run, and returns the results of its checks; the first argument is its op's context.
Execute: TypeAlias = Callable[[dg.OpExecutionContext, "CatalogRun"], Iterable[dg.AssetCheckResult]]
_OF_SOURCE = "as in the source"
_REMEDY = "Write `yield from super().execute(context, run)` in it."
_LATE = 1.25  # of the time between two nightly runs: a night that took long is not late yet


def source_partitions(names: CatalogNames, catalog: CatalogSource) -> dg.AssetSpec:
    """Return the external asset with one dynamic partition per key of the catalog."""
    upstream = asset_key(catalog.url)
    return dg.AssetSpec(
        names.source_partitions,
        deps=[upstream] if upstream else None,
        partitions_def=names.partitions,
        group_name=names.group,
        description=(
            f"{catalog.describe()}\n\n"
            "Each partition is a set of texts with ids. Its data version is "
            "the source version, a token that changes when the partition may have changed. The "
            f"sensor `{names.sensor}` and each run report it; the schedule `{names.schedule}` "
            "handles removed partitions."
        ),
    )


def superbatches(names: CatalogNames) -> dg.AssetSpec:
    """Return the asset with an event per SuperBatch."""
    return dg.AssetSpec(
        names.superbatches,
        deps=[names.source_partitions],
        group_name=names.group,
        kinds={"arrow"},
        description=(
            "The input of each encode call: many small partitions together, or a piece of a large "
            f"one. Runs of `{names.refresh_job}` and `{names.embed_job}` report one event per "
            "SuperBatch, with its metrics."
        ),
    )


def files_metadata(settings: Settings, dtype: str, dimension: int | None) -> Mapping[str, Any]:
    """Return metadata of an asset whose files have vectors of this type: their place and columns.

    Definitions load before a catalog exists and without a model. So the types of ids and of further
    columns are "as in the source", and the dimension is shown if a setting has it.
    """
    columns = [dg.TableColumn("id", _OF_SOURCE, "identifies the row within its partition")]
    if settings.include_text:
        columns.append(dg.TableColumn("text", "string", "what was encoded"))
    hashed = "first half of the SHA-256 of the text"
    columns.append(dg.TableColumn("text_hash", "fixed_size_binary[16]", hashed))
    columns.append(dg.TableColumn("truncated", "bool", "whether the model reads only a part"))
    if settings.chunks is not None:
        columns.append(dg.TableColumn("document_id", _OF_SOURCE, "the document of the chunk"))
        columns.append(dg.TableColumn("chunk", "int32", "its number in the document, from 0"))
        columns.append(dg.TableColumn("start", "int64", "first character of the cut text"))
        columns.append(dg.TableColumn("end", "int64", "character after its last one"))
    for name in settings.columns:
        columns.append(dg.TableColumn(name, _OF_SOURCE))

    vector = dtype
    if dimension is not None:
        vector += f"[{dimension}]"
    columns.append(dg.TableColumn("embedding", vector, "the vector of the text"))
    return {
        "dagster/uri": to_uri(settings.output),
        "dagster/column_schema": dg.TableSchema(columns),
    }


def embeddings(names: CatalogNames, settings: Settings, execute: Execute) -> dg.AssetsDefinition:
    """Return the asset with a file per partition, and the checks that end its runs."""
    checks = run_checks(names, settings)
    limit = settings.max_partitions_per_run
    backfills = dg.BackfillPolicy.multi_run(limit) if limit else dg.BackfillPolicy.single_run()

    @dg.multi_asset(
        name=names.embeddings_op,
        specs=[_embeddings_spec(names, settings)],
        check_specs=checks,
        partitions_def=names.partitions,
        backfill_policy=backfills,
        pool=POOL,
        required_resource_keys=names.resource_keys,
    )
    def embed(
        context: dg.AssetExecutionContext, config: LaunchConfig
    ) -> Iterator[dg.AssetCheckResult | dg.Output[None]]:
        """Embed the partitions of this run that are missing or stale."""
        op_context = context.op_execution_context
        keys = partition_keys_of(context) if config.keys is None else config.keys
        run = CatalogRun(names, settings, op_context, config, keys)
        results = run.results_of(execute)
        yield from outputs_without_result(checks, results)
        yield from results
        run.end()

    return embed


def _embeddings_spec(names: CatalogNames, settings: Settings) -> dg.AssetSpec:
    spec = dg.AssetSpec(
        names.embeddings,
        deps=[names.source_partitions, names.superbatches],
        skippable=True,
        code_version=CODE_VERSION,
        group_name=names.group,
        kinds={"parquet", "pytorch"},
        metadata=files_metadata(settings, settings.dtype, settings.dimension),
        freshness_policy=_freshness_policy(settings),
        description=(
            "One Parquet file per partition with id, text and embedding. A run skips "
            "partitions that are up to date, unless its config says `force: true`.\n\n"
            f"The job `{names.refresh_job}`, which the schedule `{names.schedule}` "
            "launches, embeds everything missing or stale; the job "
            f"`{names.embed_job}` partitions that you or the sensor `{names.sensor}` "
            f"name. The job `{names.check_job}` compares all files with the catalog."
        ),
    )
    # It loads inputs that name no input manager, and writes nothing.
    return spec.with_io_manager_key(names.input_resource)


def _freshness_policy(settings: Settings) -> dg.FreshnessPolicy | None:
    """Return a policy that warns after one nightly run is missed, and fails after two.

    It follows the longest time between two nightly runs, such as a weekend: the deadlines of a cron
    policy would be missed each Monday until the run has ended. Without `nightly_cron` in the
    settings the schedule is off, and nothing is overdue.
    """
    if "nightly_cron" not in settings.model_fields_set:
        return None
    wait = longest_wait(settings.nightly_cron, settings.timezone)
    if wait is None:
        return None
    return dg.FreshnessPolicy.time_window(fail_window=2 * wait, warn_window=_LATE * wait)


def embedding_jobs(
    names: CatalogNames, settings: Settings, execute: Execute
) -> tuple[dg.JobDefinition, dg.JobDefinition]:
    """Return the job for the whole catalog, and the job whose config names partitions."""

    @dg.op(
        name=names.refresh_op,
        pool=POOL,
        out=dg.Out(dg.Nothing),
        required_resource_keys=names.resource_keys,
    )
    def refresh(context: dg.OpExecutionContext, config: LaunchConfig) -> None:
        """Embed what is missing or stale of what the config names, or of the whole catalog."""
        run = CatalogRun(names, settings, context, config, config.keys)
        for result in run.results_of(execute):
            log_result(names, context, result)
        run.end()

    whole = "Embeds every partition that is missing or stale, in one run."
    any_set = "Embeds any set of partitions in one run: the config names their keys or their state."
    return (
        job_of(names.refresh_job, refresh, whole),
        job_of(names.embed_job, refresh.alias(names.embeddings_op), any_set),
    )


class CatalogRun:
    """A run of the asset or of a job, and how it ends in Dagster.

    Attributes:
        partition_keys: what the run was launched for, as `source_partitions` shows it; None is the
            whole catalog.
    """

    def __init__(
        self,
        names: CatalogNames,
        settings: Settings,
        context: dg.OpExecutionContext,
        config: LaunchConfig,
        partition_keys: Sequence[str] | None,
    ) -> None:
        self.partition_keys = partition_keys
        self._has_begun = False
        self._names = names
        self._settings = settings
        self._context = context
        self._config = config
        self._outcome = Outcome(
            Truncation(settings.max_truncated_share),
            SetAside(settings.max_set_aside_share),
            names.embeddings,
        )

    @property
    def report(self) -> RunReport:
        """The metrics of the run, empty before `embed`."""
        return self._outcome.report

    def results_of(self, execute: Execute) -> list[dg.AssetCheckResult]:
        """Return the results of the checks; fail a run whose `execute` did not embed."""
        with errors_as_failures(self._context):
            results: Any = execute(self._context, self)
            if results is None:
                raise ConfigError(
                    "execute of the component returned None; expected the results of the checks. "
                    f"{_REMEDY}"
                )
            results = list(results)
            if not self._has_begun:
                raise ConfigError(f"execute of the component embedded nothing. {_REMEDY}")
            return results

    def embed(self) -> list[dg.AssetCheckResult]:
        """Embed what the run was launched for and report it to Dagster; return the results of its
        checks. Failed partitions are in the report, and fail the run afterwards."""
        self._has_begun = True
        try:
            with executing(self._context):
                self._refresh()
        except dg.DagsterExecutionInterruptedError as error:
            self._outcome.ended_by = error
            with suppress(Exception):
                self._context.log.info(self._last_line())
            raise
        return self._check_results()

    def end(self) -> None:
        """Raise the failure of a run with failed partitions."""
        if self._outcome.failures:
            raise failure_of(self._names, self._context, self._outcome)

    def _refresh(self) -> None:
        """Fill the outcome; an error that ends the run is reported before it is raised."""
        names = self._names
        context = self._context
        outcome = self._outcome
        try:
            space = Refresh(names, context, self._config, outcome).run(self.partition_keys)
        except Exception as error:
            outcome.ended_by = error
            # also those whose events the run has not received
            for failure in outcome.report.partitions_failed:
                outcome.fail(failure)
            self._report_end()
            if isinstance(error, SurgeError):
                raise failure_of(names, context, outcome) from error
            allow_run_retry(context, is_passing(error))
            raise
        report_failures(names, context, outcome)
        context.log.info(outcome.sum_up())
        if outcome.published or not outcome.failures:
            self._report_whole_output(space)

    def _report_whole_output(self, space: Space) -> None:
        text = self._outcome.summary
        if not self._outcome.published:
            text = f"Nothing to do: {text}"
        store = self._names.resources(self._context).output.open()
        report_whole_output(self._context, self._outcome.asset, store, space, text)

    def _check_results(self) -> list[dg.AssetCheckResult]:
        failed = failed_on_record(self._outcome.asset, self._context.instance)
        in_run = set(map(to_partition_key, self._outcome.partitions))
        return run_check_results(self._names, self._settings, self._outcome, len(failed - in_run))

    def _report_end(self) -> None:
        """Report the checks and failures of a run that an error ended; never raise another one."""
        names = self._names
        context = self._context
        try:
            report_failures(names, context, self._outcome)
            context.log.info(self._outcome.sum_up())
            for result in self._check_results():
                # one that passed covers a part of the run, and would replace an earlier failure
                if not result.passed:
                    log_result(names, context, result)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            with suppress(Exception):  # Dagster stores log lines where it stores events
                context.log.error(f"the end of this run could not be recorded: {reason}")

    def _last_line(self) -> str:
        """Return what a terminated run has published, and what embeds the rest."""
        names = self._names
        done = self._outcome.sum_up() if self._outcome.partitions else "Nothing was begun"
        return (
            f"Terminated. {done}. Launch {names.refresh_job} for the rest, or wait for the "
            f"schedule {names.schedule}, if it is on; the sensor {names.sensor} leaves it alone "
            "until its source changes."
        )
