"""What a machine of a cluster does: it owns an encoder pool, reads from the source and publishes to
the store itself.

Texts and vectors never travel between machines: the driver sends keys and what it has decided of
them, and gets receipts.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from surge_dagster.config.run_setup import RunSetup
from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Freshness
from surge_dagster.engine.plan.dividing import Piece
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.old_rows import ReuseAnswer
from surge_dagster.engine.run.report import Event, Failure
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.version import __version__

# While one is published and the next one is read, the encoder has the texts of the other.
STRETCHES_AT_ONCE = 2


class MachineLost(SurgeError):
    """The machine, its process, or its encoder pool ended under a stretch."""


@dataclass(frozen=True, eq=False, slots=True)
class Stretch:
    """What one machine embeds in one go.

    Attributes:
        losses: machines that were lost with it.
        avoids: the machine that could not do it; another one tries, if there is one.
    """

    piece: Piece
    losses: int = 0
    avoids: str = ""


@dataclass(frozen=True, slots=True)
class StretchOutcome:
    """The events of a stretch, in the order of their commits.

    Attributes:
        stopped: whether it was stopped before its end.
    """

    events: list[Event]
    stopped: bool


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


class Cluster(Protocol):
    """Machines that come and go; a task is a stretch that one of them has."""

    def machines(self) -> dict[str, MachineFacts]:
        """Return the machines that can encode now, by name."""
        ...

    def request(self, machines: int) -> None:
        """Set how many machines could be used, for whatever starts and ends machines."""
        ...

    def embed(self, machine: str, stretch: Stretch, freshness: Mapping[str, Freshness]) -> Any: ...

    def wait(self, tasks: Sequence[Any], seconds: float) -> list[Any]:
        """Return the tasks that are done, after the first of them or this time."""
        ...

    def result(self, task: Any) -> StretchOutcome:
        """Return the outcome of a stretch.

        Raises:
            MachineLost: the machine could not finish it.
            Exception: the error that ended the stretch on the machine.
        """
        ...

    def stop(self, task: Any) -> None:
        """Ask for the end of a stretch."""
        ...

    def leave_out(self, machine: str) -> None:
        """End a machine's process, and do not use the machine again."""
        ...

    def close(self) -> None:
        """End all processes that this run started."""
        ...


class Machine:
    """Embeds stretches, each in a run of its own, with one encoder pool.

    A few threads may call it concurrently; the runs share the pool and the memory.

    Args:
        token: see `write_token`.

    Raises:
        ConfigError: the output is not that of the driver.
    """

    def __init__(self, setup: RunSetup, token: str) -> None:
        store = setup.open_store()
        try:
            store.read_end(token, 1)
        except FileNotFoundError:
            raise ConfigError(
                f"the output {store.url} is another one here than on the machine that began this "
                "run. All machines need one output: name a bucket, or a folder that they share"
            ) from None
        self._setup = setup
        # The first of a key that comes again; the driver refuses the others.
        self._partitions = {each.key: each for each in reversed(list(setup.open_source()))}
        self._pool = setup.open_pool()
        self._pool.start()
        self._outputs = setup.new_run([], self._pool).listed_outputs()
        self._reuse_answer = ReuseAnswer()  # one sample for all stretches
        self._running: dict[int, EmbeddingRun] = {}
        self._stopped = set[int]()

    def facts(self) -> MachineFacts:
        return MachineFacts(
            host=socket.gethostname(),
            version=__version__,
            vectors_key=self._pool.space.vectors_key,
            precision=self._pool.precision,
            device=self._pool.device,
            hardware=self._pool.hardware,
            workers=self._pool.workers,
        )

    def embed(
        self, number: int, piece: Piece, freshness: Mapping[str, Freshness]
    ) -> StretchOutcome:
        """Embed a piece of the catalog.

        Args:
            number: for `stop`; never given twice.
            freshness: what the driver has decided of these partitions.
        """
        listed: list[Partition] = []
        gone: list[Event] = []
        for key in piece.keys:
            if key in self._partitions:
                listed.append(self._partitions[key])
            else:
                reason = f"{key!r}: the source no longer has this partition"
                gone.append(Failure(key, reason, transient=True))
        if not listed:
            return StretchOutcome(gone, stopped=False)

        run = self._setup.new_run(
            listed,
            self._pool,
            freshness=freshness,
            outputs=self._outputs,
            ranges=() if piece.rows is None else [piece.rows],
            at_once=STRETCHES_AT_ONCE,
            reuse_answer=self._reuse_answer,
        )
        self._running[number] = run
        try:
            if number in self._stopped:
                run.stop()
            with contextlib.closing(run.events()) as events:
                return StretchOutcome([*gone, *events], run.stopped)
        finally:
            del self._running[number]

    def stop(self, number: int) -> None:
        """End a stretch, from another thread: what is encoded is published."""
        self._stopped.add(number)
        run = self._running.get(number)
        if run is not None:
            run.stop()


def write_token(store: Store) -> str:
    """Write a small object that only this output has, and return its name."""
    name = f".cluster/{secrets.token_hex(16)}"
    with store.create(name) as upload:
        upload.sink.write(b"token")
        upload.publish(lambda: None)
    return name


def require_alike(facts: MachineFacts, space: Space, precision: str | None) -> None:
    """Refuse a machine that would make other vectors.

    Args:
        precision: of the machines that encode already; None if there are none.

    Raises:
        ConfigError: names the machine and the difference.
    """
    compared = {
        "version": (facts.version, __version__),
        "model or another of its settings": (facts.vectors_key, space.vectors_key),
        "precision": (facts.precision, precision or facts.precision),
    }
    for what, (found, expected) in compared.items():
        if found != expected:
            raise ConfigError(
                f"the machine {facts.host} is not used: it has another {what} ({found}) than this "
                f"run ({expected}), and would make other vectors. Give all machines the same "
                "version, model and settings"
            )


@dataclass(slots=True)
class MachineWork:
    """What a machine has done so far; times are in seconds since the run began.

    Attributes:
        begun: when it could encode first.
        ended: when it ended a stretch last.
        weight: of its stretches, in bytes of text.
        lost_at: when stretches came back because it was lost.
    """

    facts: MachineFacts
    begun: float
    ended: float = 0.0
    texts: int = 0
    weight: int = 0
    lost_at: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From when it could encode until its last stretch ended."""
        return max(0.0, self.ended - self.begun)
