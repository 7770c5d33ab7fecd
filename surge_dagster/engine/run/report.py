"""What a run reports: SuperBatches, published partitions, what is wrong with others, and metrics
of the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from surge_dagster.engine.encoder.metrics import NO_COSTS, Costs
from surge_dagster.engine.errors import DataError, PlaceTaken, SurgeError, TransientError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.sources.partition import Partition, located
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support.timeline import Span

# Facts of a file that its receipt repeats.
_OF_FILE = (
    "space",
    "rows",
    "dimension",
    "source_version",
    "content_digest",
    "desired_version",
    "truncated",
    "source_rows",
    "skipped_rows",
    "blank_texts",
    "rejected_rows",
    "transient_rows",
    "rows_reused",
    "rows_encoded",
    "oldest_encoded_at",
)
SLOW_PACE = 2.0
_WORTH_A_WARNING_SECONDS = 1.0
_DERIVED = (
    "prediction_error",
    "texts_per_second",
    "duty_cycle",
    "fill_ratio",
    "worker_idle_ratio",
    "cost",
    "cost_per_million_texts",
)


Action = Literal["encoded", "republished", "fresh", "derived"]


@dataclass(frozen=True, slots=True)
class SuperBatchReport:
    """Metrics of one encode call and of publishing it.

    Attributes:
        texts: also those that have their vectors from old files.
        truncated: texts whose first tokens are all that the model saw.
        fill_ratio: texts with new vectors / B_min.
        duty_cycle: share of the time since the previous SuperBatch in which the pool was encoding.
        worker_idle_ratio: share of the workers' time in the call without a forward pass.
        pace_ratio: see `Pace`; None until enough like it were encoded.
        peak_resident_bytes: the most that the run held until then.
        encode_span, serialize_span: None if there was no work, or if the run was
            stopped during it.
    """

    index: int
    partitions: int
    texts: int
    text_bytes: int
    costs: Costs
    truncated: int = 0
    fill_ratio: float = 1.0
    duty_cycle: float = 1.0
    worker_idle_ratio: float = 0.0
    pace_ratio: float | None = None
    peak_resident_bytes: int = 0
    encode_span: Span | None = None
    serialize_span: Span | None = None

    @property
    def texts_per_second(self) -> float | None:
        """Texts that the encode call computed, over its seconds; None if it computed none."""
        return self.costs.texts_per_second

    @property
    def is_slow(self) -> bool:
        """Whether its encode call took so much longer than others that somebody should know."""
        is_worth_a_warning = self.costs.encode_seconds > _WORTH_A_WARNING_SECONDS
        return is_worth_a_warning and self.pace_ratio is not None and self.pace_ratio > SLOW_PACE

    @property
    def slow_message(self) -> str:
        """What a person should know of a SuperBatch that `is_slow`."""
        return (
            f"SuperBatch {self.index}: its {self.costs.texts_computed:,} texts took "
            f"{self.costs.encode_seconds:.1f} s, {self.pace_ratio:.1f} times as long as usual. "
            "Check whether something else uses the device or slows it down."
        )

    def as_dict(self) -> dict[str, Any]:
        """All metrics by name, those of `costs` among them."""
        return _flat(self) | {"texts_per_second": self.texts_per_second}


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known of a partition whose file is complete and valid.

    Attributes:
        action: "encoded"; "republished" if only the source version had moved; "fresh" if there was
            nothing to do; "derived" from the file of another space.
        bytes, etag: of the file, as published.
        truncated: texts whose first tokens are all that the model saw.
        source_rows, skipped_rows, blank_texts, rejected_rows, transient_rows: see `FileFacts`.
        superbatch: index of the SuperBatch that completed it, None unless it was encoded.
        texts_reused: rows whose vectors other runs had staged.
        rows_reused, rows_encoded, oldest_encoded_at: see `VectorOrigin`; of a file that was
            republished, those it had.
    """

    key: str
    action: Action
    path: str
    rows: int
    dimension: int
    bytes: int
    etag: str
    truncated: int
    source_version: str
    content_digest: str
    desired_version: str
    space: str
    superbatch: int | None = None
    texts_reused: int = 0
    source_rows: int = 0
    skipped_rows: int = 0
    blank_texts: int = 0
    rejected_rows: int = 0
    transient_rows: int = 0
    rows_reused: int = 0
    rows_encoded: int = 0
    oldest_encoded_at: str = ""

    @classmethod
    def of(
        cls,
        facts: FileFacts,
        stored: StoredObject,
        location: str,
        *,
        action: Action = "encoded",
        superbatch: int | None = None,
        texts_reused: int = 0,
    ) -> Self:
        """Return the receipt of a published file."""
        of_file: dict[str, Any] = {name: getattr(facts, name) for name in _OF_FILE}
        return cls(
            key=facts.partition_key,
            action=action,
            path=location,
            bytes=stored.size,
            etag=stored.etag,
            superbatch=superbatch,
            texts_reused=texts_reused,
            **of_file,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A partition that was not published, and why; `transient` ones may succeed when tried again.

    Attributes:
        reason: the whole text for the operator: where, what was expected and what came, what to do.
        remedy: the end of `reason` that says what to do; may be empty.
        in_source: whether the error is in the partition's own data.
    """

    key: str
    reason: str
    transient: bool = False
    remedy: str = ""
    in_source: bool = True


@dataclass(frozen=True, slots=True)
class OldVectorSample:
    """What a run found when it encoded a sample of old rows again, before it reused any.

    Attributes:
        cosines: of the new vector to the old one, by the key of the partition whose row it is.
        lowest_cosine: that the precision promises.
    """

    cosines: Mapping[str, float]
    lowest_cosine: float

    @property
    def drifted(self) -> dict[str, float]:
        """The partitions whose vectors differ by more than the precision promises; then the run
        takes no vectors from old files."""
        return {key: cosine for key, cosine in self.cosines.items() if cosine < self.lowest_cosine}

    @property
    def message(self) -> str:
        """What a person should know of a sample with rows that have drifted."""
        key, cosine = min(self.drifted.items(), key=lambda each: each[1])
        return (
            f"{len(self.drifted):,} of {len(self.cosines):,} old vectors differ from new ones of "
            "the same texts: the model or a device gives other vectors than before, so this run "
            f"reuses no old vectors (lowest cosine {cosine:.6f}, in partition {key!r}; expected at "
            f"least {self.lowest_cosine:g})"
        )


@dataclass(frozen=True, slots=True)
class Prices:
    """What a run costs, in any currency; None for what has no price.

    Attributes:
        per_hour: of one machine.
        per_million_tokens: of an encoder behind HTTP.
        max_cost: of the tokens of a run at most.
    """

    per_hour: float | None = None
    per_million_tokens: float | None = None
    max_cost: float | None = None

    def cost(self, machine_seconds: float, tokens: float) -> float | None:
        """Return the cost of machines and tokens; None without a price."""
        if self.per_hour is None and self.per_million_tokens is None:
            return None
        of_machines = (self.per_hour or 0.0) * machine_seconds / 3600
        return of_machines + (self.per_million_tokens or 0.0) * tokens / 1e6

    def __str__(self) -> str:
        parts = list[str]()
        if self.per_hour is not None:
            parts.append(f"{self.per_hour:g} an hour")
        if self.per_million_tokens is not None:
            parts.append(f"{self.per_million_tokens:g} per million tokens")
        return " and ".join(parts)


NO_PRICES = Prices()


def million_cost(cost: float, texts: int) -> float | None:
    """Return the cost of a million texts; None if there are none."""
    return 1e6 * cost / texts if texts else None


Event = SuperBatchReport | OldVectorSample | Receipt | Failure


@dataclass(slots=True)
class RunReport:
    """Metrics of one run, live while it goes on; names and meaning are those of `embed --json`.

    Attributes:
        texts_reused: texts whose vectors an earlier run had staged.
        costs: sums over the SuperBatches.
        compared_rows: old rows that were encoded again, to be compared; see `OldVectorSample`.
        drifted_rows: compared rows that got another vector; then the run takes no vectors
            from old files.
        predicted_wall_seconds: by the costs that were measured before the run, for the SuperBatches
            that it made; None until it has ended by itself, and if it encoded nothing.
        call_seconds: fixed cost of an encode call (c_ipc), as it was measured before the run.
        run_seconds: from the beginning of the run to its end, with the start of the encoder; 0
            until it has ended.
        machines: how many took part; more than one over a cluster.
        prices: that are set.
    """

    space: str = ""
    space_title: str = ""
    dimension: int = 0
    device: str = ""
    hardware: str = ""
    precision: str = ""
    encoder_notes: list[str] = field(default_factory=list)
    pool_start_seconds: float = 0.0
    partitions_written: int = 0
    partitions_skipped: int = 0
    partitions_republished: int = 0
    partitions_failed: list[Failure] = field(default_factory=list)
    texts_reused: int = 0
    truncated: int = 0
    skipped_rows: int = 0
    blank_texts: int = 0
    rejected_rows: int = 0
    transient_rows: int = 0
    superbatches: int = 0
    slow_superbatches: int = 0
    compared_rows: int = 0
    drifted_rows: int = 0
    costs: Costs = NO_COSTS
    workers: int = 1
    wall_seconds: float = 0.0
    exposed_io_seconds: float = 0.0
    time_to_first_output_seconds: float | None = None
    max_in_flight_texts: int = 0
    peak_resident_bytes: int = 0
    peak_rss_bytes: int | None = None
    b_min: int = 0
    b_max: int = 0
    predicted_wall_seconds: float | None = None
    call_seconds: float = 0.0
    run_seconds: float = 0.0
    machines: int = 1
    prices: Prices = NO_PRICES

    @property
    def texts_encoded(self) -> int:
        return self.costs.texts_encoded

    @property
    def prediction_error(self) -> float | None:
        """How far the prediction was from the outcome, as a share of it; above 0 the run took less
        than predicted."""
        if self.predicted_wall_seconds is None or self.wall_seconds <= 0:
            return None
        return self.predicted_wall_seconds / self.wall_seconds - 1

    @property
    def texts_per_second(self) -> float:
        """Texts that encode calls computed, over the run's time; equal and reused texts do not
        count."""
        if self.wall_seconds <= 0:
            return 0.0
        return self.costs.texts_computed / self.wall_seconds

    @property
    def duty_cycle(self) -> float:
        """Share of the run's time in which the pool was encoding (SURGE, equation 9)."""
        if self.wall_seconds <= 0:
            return 0.0
        return min(1.0, self.costs.encode_seconds / self.wall_seconds)

    @property
    def fill_ratio(self) -> float:
        """Mean texts of a SuperBatch over B_min."""
        texts = self.superbatches * self.b_min
        return self.texts_encoded / texts if texts else 0.0

    @property
    def worker_idle_ratio(self) -> float:
        """Share of the workers' time, over the whole run, in which their devices had nothing to
        compute."""
        return self.costs.worker_idle_ratio(self.workers, self.wall_seconds)

    @property
    def cost(self) -> float | None:
        """The price of the machines that took part, over `run_seconds`, and of the tokens."""
        return self.prices.cost(self.machines * self.run_seconds, self.costs.tokens)

    @property
    def cost_per_million_texts(self) -> float | None:
        """The cost of a million texts with new vectors, equal ones included; None if there are
        none."""
        return None if self.cost is None else million_cost(self.cost, self.texts_encoded)

    def count(self, event: Event, seconds: float) -> None:
        """Add an event, `seconds` after the run began."""
        match event:
            case SuperBatchReport():
                self.superbatches += 1
                self.costs = self.costs.plus(event.costs)
                if event.is_slow:
                    self.slow_superbatches += 1
            case OldVectorSample():
                self.compared_rows += len(event.cosines)
                self.drifted_rows += len(event.drifted)
            case Failure():
                self.partitions_failed.append(event)
            case Receipt(action="fresh"):
                self.partitions_skipped += 1
            case Receipt():
                self._count_written(event, seconds)

    def _count_written(self, receipt: Receipt, seconds: float) -> None:
        self.partitions_written += 1
        self.texts_reused += receipt.texts_reused
        self.skipped_rows += receipt.skipped_rows
        self.blank_texts += receipt.blank_texts
        self.rejected_rows += receipt.rejected_rows
        self.transient_rows += receipt.transient_rows
        if receipt.action == "republished":
            self.partitions_republished += 1
        if receipt.action == "encoded":
            self.truncated += receipt.truncated
        self.wall_seconds = seconds
        if self.time_to_first_output_seconds is None:
            self.time_to_first_output_seconds = seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the report as one JSON-ready document."""
        document = _flat(self) | {name: getattr(self, name) for name in _DERIVED}
        del document["prices"]
        document["price_per_hour"] = self.prices.per_hour
        document["price_per_million_tokens"] = self.prices.per_million_tokens
        document["max_cost"] = self.prices.max_cost
        document["partitions_failed"] = [
            {"key": failure.key, "reason": failure.reason} for failure in self.partitions_failed
        ]
        return document


def _flat(report: SuperBatchReport | RunReport) -> dict[str, Any]:
    """Return the fields of a report, with the metrics of its costs in their place."""
    document = asdict(report) | report.costs.as_dict()
    del document["costs"]
    return document


def require_unchanged(partition: Partition) -> None:
    """Look up the source version again, so that of two writers the one with the newer source wins.

    Raises:
        TransientError: the source has changed, or was removed, since the partition was listed.
    """
    current = partition.current_source_version()
    if current != partition.source_version:
        change = "it was removed" if current is None else f"it is {current!r} now"
        raise TransientError(
            f"partition {partition.key!r}: its source changed while it was encoded (source version "
            f"{partition.source_version!r} was read, {change}). The result was thrown away; "
            "run again.",
            partition.key,
        )


def failure_of(partition: Partition, error: SurgeError | OSError) -> Failure:
    """Return the failure of a partition that could not be read or published; transient if its
    source is being replaced."""
    if isinstance(error, DataError):
        try:
            require_unchanged(partition)
        except (SurgeError, OSError):
            changed = "Its source changed while it was read; run again."
            return Failure(partition.key, f"{error} {changed}", transient=True, remedy=changed)
        is_taken = isinstance(error, PlaceTaken)
        return Failure(
            partition.key,
            str(located(partition, error)),
            remedy=error.remedy,
            in_source=not is_taken,
        )
    if isinstance(error, SurgeError):
        return Failure(partition.key, str(error), transient=isinstance(error, TransientError))
    remedy = "Run again when its storage answers."
    return Failure(partition.key, f"partition {partition.key!r}: {error}. {remedy}", True, remedy)
