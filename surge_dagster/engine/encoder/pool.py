"""EncoderPool: one call encodes a SuperBatch of texts in shared memory and writes the vectors beside them.

    with EncoderPool(EncodingSpec(), devices="auto") as pool, pool.arena(slots=2, max_texts=…, max_bytes=…) as arena:
        slot = arena.acquire()
        slot.append(texts)
        metrics = pool.encode(slot)
        vectors = slot.matrix(0, len(slot))

`submit` does not wait: when the next SuperBatch is submitted early, no worker idles between two of them.

Workers are started once and serve every call, from any thread. A start compares the backend with sentence-transformers
and measures its speed; both answers are cached on disk, so the second start only loads the model. The pool's own
process imports neither torch nor a model: it holds the arenas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.encoder.calls import EncodeCall, EncodeMetrics, copy_of
from surge_dagster.engine.encoder.costs import EncodeCosts, timed_calls
from surge_dagster.engine.encoder.devices import (
    choose_devices,
    choose_precision,
    fallback_precision,
    hardware,
    worker_environment,
    worker_threads,
)
from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.schedule import Job
from surge_dagster.engine.encoder.worker_process import WorkerSeat
from surge_dagster.engine.errors import ConfigError, EncoderError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.support.waiting import wait_in_turns

log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "openvino", "hash")
DEFAULT_HANG_TIMEOUT_SECONDS = 120.0


class EncoderPool:
    """Worker processes that encode into one vector space. Ready when constructed; close it, or use `with`.

    Args:
        spec: the settings that shape a vector, or a resolved space.
        task: "document" for the texts of a catalog, "query" for those of a search: models may have other prompts and
            modules for each.
        devices: "auto", "cpu", "cuda", "cuda:0,cuda:1", or a list; a device named twice gets two workers.
        precision: "auto" (fp32 on the CPU; on GPUs fp16, or bf16 where fp16 overflows), "fp32", "fp16" or "bf16".
        backend: "auto", "torch", "openvino", or "module:Class" for your own.
        token_budget: tokens of one forward pass; None is the backend's choice.
        check_parity: compare with sentence-transformers at the start, and refuse vectors below the promised cosine.
        hang_timeout_seconds: a worker with work that shows no progress for this long is replaced.
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
        task: Task = "document",
        devices: str | Sequence[str] = "auto",
        precision: str = "auto",
        backend: str = "auto",
        token_budget: int | None = None,
        check_parity: bool = True,
        hang_timeout_seconds: float = DEFAULT_HANG_TIMEOUT_SECONDS,
        start_timeout_seconds: float = 900.0,
        max_respawns: int = 3,
    ) -> None:
        started = time.perf_counter()
        if backend not in BACKENDS and ":" not in backend:
            raise ConfigError(f"backend is one of {', '.join(BACKENDS)} or module:Class, not {backend!r}")
        if token_budget is not None and token_budget < 1:
            raise ConfigError(f"token_budget is at least 1, not {token_budget}")
        self.space = replace(_with_folder(spec), task=task)
        choice = choose_devices(devices)
        self.device = ",".join(dict.fromkeys(choice.devices))
        self.hardware = hardware(choice)
        self.precision = choose_precision(precision, choice)
        settings = {
            "precision": self.precision,
            "threads": worker_threads(choice),
            "token_budget": token_budget,
            "fallback_precision": fallback_precision(precision, choice),
        }
        message = {
            "op": "load",
            "space": asdict(self.space),
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
            self.precision = _common_precision(ready)
            cosines = [message["lowest_cosine"] for message in ready if message["lowest_cosine"] is not None]
            self.lowest_cosine: float | None = min(cosines) if cosines else None
            self.notes: list[str] = list(dict.fromkeys(note for message in ready for note in message["notes"]))
            for note in self.notes:
                log.warning("%s", note)
            reasons = (choice.reason, self.hardware, self.backend_detail, *self.notes)
            self.device_reason = "; ".join(filter(None, reasons))
            self.calibration = Calibration(ready[0]["calibration"])
            self.all_devices = ",".join(choice.devices)
            self.read_costs()
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - started
        log.info(
            "encoder pool ready in %.1f s: %s on %s (%s), %s, %.0f texts/s",
            *(self.start_seconds, self.space.name, self.device, self.device_reason, self.precision),
            self.texts_per_second,
        )

    def start(self) -> None:
        """Harmless."""

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return self.space.dimension

    def read_costs(self, *, anew: bool = False) -> EncodeCosts:
        """Take the costs of encode calls from what was timed so far, measured now if nothing was; they become `costs`.

        Args:
            anew: measure again, and forget what was timed before.
        """
        calls = timed_calls(self.calibration, self.all_devices, self._time, anew=anew)
        self.costs = EncodeCosts.of(*calls, self._workers)
        return self.costs

    @property
    def texts_per_second(self) -> float:
        """Texts of the usual length that the pool encodes per second."""
        return self._workers / self.costs.text_seconds()

    @property
    def replays(self) -> int:
        """Chunks that were encoded again because their worker was lost."""
        return self._dispatcher.replays

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running workers."""
        return self._dispatcher.worker_pids()

    def require_documents(self) -> None:
        """Refuse to encode a catalog as queries.

        Raises:
            ConfigError: the pool was started for queries, which this model encodes in another way.
        """
        if self.space.side == "query":
            raise ConfigError('the pool encodes queries; start it with task="document" for the texts of a catalog')

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

    def submit(self, slot: Slot, borders: np.ndarray | None = None, rows: np.ndarray | None = None) -> EncodeCall:
        """Starts to fill the slot's matrix with the vectors of its texts. Several threads may call it concurrently.

        Args:
            slot: with texts; it must not be released before the call has ended.
            borders: first rows of the groups (partitions) that fail as a whole when one of their texts cannot be
                encoded, ascending, beginning with 0; None: each row is a group.
            rows: the rows to encode, ascending; the others keep the vectors that they have. None: all. A slot has one
                such call at a time.

        Raises:
            EncoderError: the pool failed; the message holds the last output of the failed worker.
        """
        self._raise_failure()
        job = Job(slot, borders, rows)
        if job.rows:
            self._dispatcher.encode(job)
        else:
            job.done.set()
        return EncodeCall(job, self._workers, self._dispatcher.abandon)

    def encode(self, slot: Slot) -> EncodeMetrics:
        """Fills the slot's matrix with the vectors of its texts, and waits for it.

        Raises:
            EncoderError: the pool failed, or a text cannot be encoded: the error names its row.
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

    def vectors(self, texts: pa.LargeStringArray) -> np.ndarray:
        """The vectors of some texts as float32, [n, dimension], for callers that have no arena.

        Raises:
            EncoderError: see `encode`.
        """
        with self.arena(slots=1, max_texts=max(1, len(texts)), max_bytes=max(1, texts.nbytes)) as arena:
            slot = arena.acquire()
            slot.append(texts)
            self.encode(slot)
            vectors = slot.matrix(0, len(texts)).astype(np.float32)  # a copy
            slot.release()
        return vectors

    def close(self) -> None:
        """Ends the workers and waits for them. Closing twice is harmless."""
        self._dispatcher.close()

    def _time(self, texts: list[str]) -> tuple[float, float]:
        """Encode `texts`; gives their tokens and the seconds, those of a pool that has other calls as well."""
        column = pa.array(texts, pa.large_string())
        with self.arena(slots=1, max_texts=len(texts), max_bytes=max(1, column.nbytes)) as arena:
            slot = arena.acquire()
            slot.append(column)
            metrics = self.encode(slot)
            slot.release()
        return metrics.costs.tokens, metrics.costs.shared_seconds

    def _raise_failure(self) -> None:
        if self._dispatcher.failure is not None:
            raise copy_of(self._dispatcher.failure)

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _common_precision(ready: Sequence[Mapping[str, Any]]) -> str:
    """The precision of all workers, which each chose for its own device."""
    found = sorted({message["precision"] for message in ready})
    if len(found) > 1:
        raise ConfigError(
            f"this model's vectors reach the promised cosine in {' on some devices and in '.join(found)} on others; "
            "set precision to bf16 or fp32"
        )
    return found[0]


def _with_folder(spec: EncodingSpec | Space) -> Space:
    """The space to encode into, with a model folder; a space read from a space.json is resolved again."""
    if isinstance(spec, EncodingSpec):
        return spec.resolve()
    if spec.model_path or spec.is_hash:
        return spec
    if spec.requested.trust_remote_code is not None:  # anyone who writes to the output may have named it
        raise ConfigError(
            f"the space {spec.name} names code of its model {spec.requested.model!r}, which is not run on the word of "
            "an output: give an EncodingSpec with trust_remote_code instead"
        )
    found = spec.requested.resolve()
    if found.name != spec.name:
        raise ConfigError(
            f"the model {spec.requested.model!r} on this machine gives the space {found.name}, not {spec.name}: "
            "the model or its settings changed; use a new output, or the model that this output was made with"
        )
    return found
