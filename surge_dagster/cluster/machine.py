"""What a machine of a cluster does: it owns an encoder pool, reads from the source and publishes to
the store itself.

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
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Event, Failure
from surge_dagster.engine.sources.partition import Partition, PartitionRange
from surge_dagster.engine.support.process_memory import memory_bytes
from surge_dagster.version import __version__

# While one is published and the next one is read, the encoder has the texts of the other.
STRETCHES_AT_ONCE = 2


class CatalogRuns(Protocol):
    """How runs over a catalog are made, on any machine that has the package; it travels, so it
    holds settings alone."""

    @property
    def refused(self) -> Sequence[PublishedFile]:
        """Files that look fresh and were found to be damaged, or unlike their source."""
        ...

    def open_pool(self) -> EncoderPool: ...

    def list_partitions(self) -> Iterable[Partition]: ...

    def new_run(
        self,
        partitions: Sequence[Partition],
        pool: EncoderPool,
        *,
        at_once: int = 1,
        **options: Any,
    ) -> EmbeddingRun:
        """`options` go to `EmbeddingRun`, beside the settings; so many runs share the memory
        (`memory_limit`)."""
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
    """The events of a stretch, in the order of their commits, and whether it was stopped before its
    end."""

    events: list[Event]
    stopped: bool


class Machine:
    """Embeds stretches, each in a run of its own, through a pool that lives as long as it does.

    A few threads may call it concurrently; the runs share the pool and the memory.
    """

    def __init__(self, runs: CatalogRuns) -> None:
        self._runs = runs
        self._pool = runs.open_pool()
        self._pool.start()
        self._partitions: dict[str, Partition] = {}
        self._idle_outputs: list[OutputState] = []  # listings that no run uses now
        self._running: dict[int, EmbeddingRun] = {}
        self._stopped = set[int]()

    def facts(self) -> MachineFacts:
        pool, host, key = self._pool, socket.gethostname(), self._pool.space.vectors_key
        return MachineFacts(
            host, __version__, key, pool.precision, pool.device, pool.hardware, pool.workers
        )

    def embed(
        self,
        number: int,
        keys: Sequence[str],
        ranges: Sequence[PartitionRange] = (),
        *,
        again: bool = False,
    ) -> StretchOutcome:
        """Embed these partitions of the source.

        Args:
            number: for `stop`; never given twice.
            ranges: of partitions that are not meant as a whole.
            again: another machine had them, and may have published some; else the output is not
                listed each time.
        """
        partitions = self._partitions
        if not partitions.keys() >= set(keys):
            partitions = self._partitions = {
                partition.key: partition for partition in self._runs.list_partitions()
            }
        gone = [
            Failure(key, f"{key!r}: the source no longer has this partition", transient=True)
            for key in keys
            if key not in partitions
        ]
        outputs = None
        with contextlib.suppress(IndexError):  # another thread has it
            outputs = None if again else self._idle_outputs.pop()
        outputs = outputs or listed_outputs(self._runs, self._runs.new_run([], self._pool))
        run = self._running[number] = self._runs.new_run(
            [partitions[key] for key in keys if key in partitions],
            self._pool,
            at_once=STRETCHES_AT_ONCE,
            outputs=outputs,
            ranges=[each for each in ranges if each.key in partitions],
        )
        try:
            if number in self._stopped:
                run.stop()
            with contextlib.closing(run.events()) as events:
                return StretchOutcome([*gone, *events], run.stopped)
        finally:
            del self._running[number]
            self._idle_outputs = [*self._idle_outputs, outputs][-STRETCHES_AT_ONCE:]

    def stop(self, number: int) -> None:
        """End a stretch, from another thread: what is encoded is published."""
        self._stopped.add(number)
        if (run := self._running.get(number)) is not None:
            run.stop()


def listed_outputs(runs: CatalogRuns, run: EmbeddingRun) -> OutputState:
    """The files of a run's space; those that were refused are no valid ones, unless somebody has
    replaced them."""
    outputs = run.listed_outputs()
    for file in runs.refused:
        found = outputs.files([file.facts.partition_key]).get(file.stored.name)
        if isinstance(found, PublishedFile) and found.stored == file.stored:
            outputs.refuse(found, "it is damaged, or unlike its source")
    return outputs


def memory_limit(setting: int | None, at_once: int) -> int | None:
    """The `memory_limit_bytes` of each of so many runs of a machine, of which `setting` is meant
    for all."""
    return setting if at_once == 1 else (setting or memory_bytes() // 2) // at_once


def require_alike(facts: MachineFacts, space: Space, precision: str | None) -> None:
    """Refuse a machine that would make other vectors.

    Args:
        precision: of the machines that encode already; None: there are none.

    Raises:
        ConfigError: names the machine and the difference.
    """
    wanted = {
        "version": __version__,
        "vectors_key": space.vectors_key,
        "precision": precision or facts.precision,
    }
    for name, value in wanted.items():
        if getattr(facts, name) != value:
            what = {"vectors_key": "model or another of its settings"}.get(name, name)
            raise ConfigError(
                f"the machine {facts.host} is not used: it has another {what} ({getattr(facts, name)}) than this run "
                f"({value}), and would make other vectors. Give all machines the same version, model and settings"
            )
