"""What a machine of a cluster does: it owns an encoder pool, reads from the source and publishes to the store itself.

Texts and vectors never travel between machines: keys come, and receipts go.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Event, Failure
from surge_dagster.engine.sources.partition import Partition, PartitionRange
from surge_dagster.version import __version__


class CatalogRuns(Protocol):
    """How runs over a catalog are made, on any machine that has the package; it travels, so it holds settings alone."""

    def open_pool(self) -> EncoderPool: ...

    def list_partitions(self) -> Iterable[Partition]: ...

    def new_run(self, partitions: Sequence[Partition], pool: EncoderPool, **options: Any) -> EmbeddingRun:
        """`options` go to `EmbeddingRun`, beside the settings."""
        ...


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a machine is, and what must be equal on all of them."""

    host: str
    version: str
    vectors_key: str
    precision: str
    device: str
    hardware: str
    workers: int


@dataclass(frozen=True, slots=True)
class StretchOutcome:
    """The events of a stretch, in the order of their commits, and whether it was stopped before its end."""

    events: list[Event]
    stopped: bool


class Machine:
    """Embeds stretches, one at a time, through a pool that lives as long as it does."""

    def __init__(self, runs: CatalogRuns) -> None:
        self._runs = runs
        self._pool = runs.open_pool()
        self._pool.start()
        self._partitions: dict[str, Partition] = {}
        self._outputs: OutputState | None = None
        self._run: EmbeddingRun | None = None

    def facts(self) -> MachineFacts:
        pool = self._pool
        return MachineFacts(
            socket.gethostname(),
            __version__,
            pool.space.vectors_key,
            pool.precision,
            pool.device,
            pool.hardware,
            pool.workers,
        )

    def embed(
        self, keys: Sequence[str], ranges: Sequence[PartitionRange] = (), *, again: bool = False
    ) -> StretchOutcome:
        """Embed these partitions of the source.

        Args:
            ranges: of partitions that are not meant as a whole.
            again: another machine had them, and may have published some; else the output is listed once only.
        """
        if not self._partitions.keys() >= set(keys):
            self._partitions = {partition.key: partition for partition in self._runs.list_partitions()}
        if self._outputs is None or again:
            self._outputs = self._runs.new_run([], self._pool).listed_outputs()
        known = [self._partitions[key] for key in keys if key in self._partitions]
        gone = [
            Failure(key, f"{key!r}: the source no longer has this partition", transient=True)
            for key in keys
            if key not in self._partitions
        ]
        run = self._run = self._runs.new_run(known, self._pool, outputs=self._outputs, ranges=ranges)
        with contextlib.closing(run.events()) as events:
            return StretchOutcome([*gone, *events], run.stopped)

    def stop(self) -> None:
        """End the stretch under way, from another thread: what is encoded is published."""
        if self._run is not None:
            self._run.stop()


def require_alike(facts: MachineFacts, space: Space, precision: str | None) -> None:
    """Refuse a machine that would make other vectors.

    Args:
        precision: of the machines that encode already; None: there are none.

    Raises:
        ConfigError: names the machine and the difference.
    """
    wanted = {"version": __version__, "vectors_key": space.vectors_key, "precision": precision or facts.precision}
    for name, value in wanted.items():
        if getattr(facts, name) != value:
            what = {"vectors_key": "model or another of its settings"}.get(name, name)
            raise ConfigError(
                f"the machine {facts.host} is not used: it has another {what} ({getattr(facts, name)}) than this run "
                f"({value}), and would make other vectors. Give all machines the same version, model and settings"
            )
