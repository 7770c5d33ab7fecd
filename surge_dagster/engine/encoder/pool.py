"""The encoder pool: one call takes a SuperBatch of texts in shared memory and leaves their vectors beside them.

    with EncoderPool(EncodingSpec(), devices="auto") as pool, pool.arena(slots=2, max_texts=…, max_bytes=…) as arena:
        slot = arena.acquire()
        slot.append(texts)
        metrics = pool.encode(slot)
        vectors = slot.matrix(0, len(slot))

`submit` hands a slot in without waiting: with the next SuperBatch already there, no worker waits at a boundary.

Workers are started once and serve every call, from any thread. Starting checks the backend against
sentence-transformers and measures its speed, both remembered on disk, so that the second start is a matter of loading
the model. The pool's own process imports neither torch nor a model: what it holds is the arenas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType

import numpy as np

from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.calls import EncodeCall, EncodeMetrics, Job, copy_of
from surge_dagster.engine.encoder.devices import choose_devices, choose_precision, worker_environment, worker_threads
from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.speed import texts_per_second
from surge_dagster.engine.encoder.worker_process import WorkerSeat
from surge_dagster.engine.errors import ConfigError, EncoderError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.support.waiting import wait_in_turns

log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "openvino", "hash")
_SPACE_FIELDS = ("name", "model_path", "model_digest", "prompt", "max_length", "normalize", "dimension", "dtype")


class EncoderPool:
    """Worker processes that encode into one vector space. Ready when constructed; close it, or use `with`.

    Args:
        spec: what shapes a vector, or a space that was resolved before.
        devices: "auto", "cpu", "cuda", "cuda:0,cuda:1", or a list; a device named twice gets two workers.
        precision: "auto" (fp32 on the CPU, fp16 on GPUs), "fp32", "fp16" or "bf16".
        backend: "auto", "torch", "openvino", or "module:Class" for one of your own.
        token_budget: tokens of one forward pass; None is the backend's choice.
        check_parity: compare with sentence-transformers at the start, and refuse to start when the promise is broken.
        hang_timeout_seconds: a worker that has work and shows no progress for so long is replaced.
        start_timeout_seconds: how long a worker may take to load the model; the pool does not start when one of its
            first workers takes longer.
        max_respawns: processes that one worker's seat may lose in a row before the pool gives up.

    Raises:
        ConfigError: the model, a device or a setting is wrong, or parity is not reached.
        EncoderError: the workers do not start.
    """

    def __init__(
        self,
        spec: EncodingSpec | Space = EncodingSpec(),  # noqa: B008 (frozen)
        *,
        devices: str | Sequence[str] = "auto",
        precision: str = "auto",
        backend: str = "auto",
        token_budget: int | None = None,
        check_parity: bool = True,
        hang_timeout_seconds: float = 120.0,
        start_timeout_seconds: float = 900.0,
        max_respawns: int = 3,
    ) -> None:
        started = time.perf_counter()
        if backend not in BACKENDS and ":" not in backend:
            raise ConfigError(f"backend is one of {', '.join(BACKENDS)} or module:Class, not {backend!r}")
        if token_budget is not None and token_budget < 1:
            raise ConfigError(f"token_budget is at least 1, not {token_budget}")
        self.space = _with_folder(spec)
        choice = choose_devices(devices)
        self.device = ",".join(dict.fromkeys(choice.devices))
        self.precision = choose_precision(precision, choice)
        settings = {"precision": self.precision, "threads": worker_threads(choice), "token_budget": token_budget}
        message = {
            "op": "load",
            "space": {name: getattr(self.space, name) for name in _SPACE_FIELDS},
            "requested": asdict(self.space.requested),
            "backend": backend,
            "check_parity": check_parity,
        }
        environment = worker_environment(choice)
        self._dispatcher = Dispatcher(
            [
                WorkerSeat(index, device, message | {"settings": settings | {"device": device}}, environment)
                for index, device in enumerate(choice.devices)
            ],
            hang_timeout_seconds=hang_timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
            max_respawns=max_respawns,
        )
        self._workers = len(choice.devices)
        try:
            wait_in_turns(self._dispatcher.started.wait)
            self._raise_failure()
            ready = list(self._dispatcher.ready_messages.values())
            self.backend: str = ready[0]["backend"]
            self.backend_detail: str = ready[0]["detail"]
            cosines = [message["lowest_cosine"] for message in ready if message["lowest_cosine"] is not None]
            self.lowest_cosine: float | None = min(cosines) if cosines else None
            self.notes: list[str] = list(dict.fromkeys(note for message in ready for note in message["notes"]))
            for note in self.notes:
                log.warning("%s", note)
            self.device_reason = "; ".join([choice.reason, self.backend_detail, *self.notes])
            self.texts_per_second = texts_per_second(self)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - started
        log.info(
            "encoder pool ready in %.1f s: %s on %s (%s), %s, %.0f texts/s",
            *(self.start_seconds, self.space.name, self.device, self.device_reason, self.precision),
            self.texts_per_second,
        )

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return self.space.dimension

    @property
    def replays(self) -> int:
        """Chunks that were done again because their worker was lost."""
        return self._dispatcher.replays

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._dispatcher.worker_pids()

    def arena(self, *, slots: int, max_texts: int, max_bytes: int) -> Arena:
        """Shared memory for SuperBatches of this pool's space. Close it when its vectors are no longer needed."""
        arena = Arena(
            slots=slots,
            max_texts=max_texts,
            max_bytes=max_bytes,
            dimension=self.space.dimension,
            dtype=self.space.dtype,
            on_close=self._dispatcher.drop_arena,
        )
        self._dispatcher.add_arena(arena)
        return arena

    def submit(self, slot: Slot, borders: np.ndarray | None = None) -> EncodeCall:
        """Begins to fill the slot's matrix with the vectors of its texts. Several threads may call at once.

        Args:
            slot: with texts; it must not be released before the call has ended.
            borders: first rows of the groups (partitions) that are of no use once one of their texts cannot be encoded,
                ascending, beginning with 0; None: each row is a group.

        Raises:
            EncoderError: the pool cannot go on; it holds the last words of the worker that failed.
        """
        self._raise_failure()
        job = Job(slot, borders)
        if job.rows:
            self._dispatcher.encode(job)
        else:
            job.done.set()
        return EncodeCall(job, self._workers, self._dispatcher.abandon)

    def encode(self, slot: Slot) -> EncodeMetrics:
        """Fills the slot's matrix with the vectors of its texts; blocks.

        Raises:
            EncoderError: the pool cannot go on, or a text cannot be encoded: the error names its row.
        """
        call = self.submit(slot)
        try:
            metrics = call.result()
        except BaseException:
            call.abandon()
            raise
        assert metrics is not None
        if metrics.failed:
            first = metrics.failed[0]
            raise EncoderError(f"{len(metrics.failed)} texts cannot be encoded; row {first.row}: {first.reason}")
        return metrics

    def close(self) -> None:
        """Ends the workers and waits for them; harmless when called twice."""
        self._dispatcher.close()

    def _raise_failure(self) -> None:
        if self._dispatcher.failure is not None:
            raise copy_of(self._dispatcher.failure)

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _with_folder(spec: EncodingSpec | Space) -> Space:
    """The space to encode into, with a folder to load; one read from a space.json is looked up again by its model."""
    if isinstance(spec, EncodingSpec):
        return spec.resolve()
    if spec.model_path or spec.is_hash:
        return spec
    found = spec.requested.resolve()
    if found.name != spec.name:
        raise ConfigError(
            f"the model {spec.requested.model!r} on this machine gives the space {found.name}, not {spec.name}: "
            "the model or its settings changed; use a new output, or the model that this one was made with"
        )
    return found
