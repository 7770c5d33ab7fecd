"""EncoderPool: one call encodes a SuperBatch of texts in shared memory, next to their vectors.

    with EncoderPool(EncodingSpec(), devices="auto") as pool:
        with pool.arena(slots=2, max_texts=…, max_bytes=…) as arena:
            slot = arena.acquire()
            slot.append(texts)
            metrics = pool.encode(slot)
            vectors = slot.matrix(0, len(slot))

`submit` does not wait: when the next SuperBatch is submitted early, no worker idles between two of
them. A first start compares the backend with sentence-transformers and measures its speed; both
answers are cached on disk. The pool's own process imports neither torch nor a model: it holds the
arenas.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.encoder.devices import choose_devices, no_devices, usable_cores
from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.schedule import EncodeCall, EncodeMetrics
from surge_dagster.engine.encoder.speed import Call, Speed, SpeedRecord
from surge_dagster.engine.encoder.worker_process import WorkerSeat
from surge_dagster.engine.errors import ConfigError, EncoderError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.support.waiting import wait_in_turns

log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "openvino", "hash")
DEFAULT_HANG_TIMEOUT_SECONDS = 120.0
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
_MOST_WORDS_OF_ENDPOINT = 2_000  # to measure its speed: tokens there cost money


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What is known of a pool once its workers are ready.

    Attributes:
        lowest_cosine: to sentence-transformers' own vectors; None where there is no model to
            compare with.
        tokenizer: see `Space`.
        saturation_tokens: of the passes that a device computes at the same time; 0 where a backend
            has no such number.
        truncation_side: the end at which the tokenizer cuts texts; "" if the workers take no token
            ids.
        notes: one line for each thing that an operator should know.
        device_reason: why these devices and this backend.
    """

    backend: str
    lowest_cosine: float | None
    tokenizer: str
    saturation_tokens: int
    truncation_side: str
    notes: tuple[str, ...]
    device_reason: str
    calibration: Calibration


class EncoderPool:
    """Worker processes that encode into one vector space, started by the first call that needs
    them. Use `with`.

    Args:
        task: "document" for the texts of a catalog, "query" for those of a search: models may treat
            them apart.
        devices: "auto", "cpu", "cuda", "cuda:0,cuda:1", or a list; a device named twice gets two
            workers.
        precision: "auto" (fp32 on the CPU; on GPUs fp16, or bf16 where fp16 overflows), "fp32",
            "fp16" or "bf16".
        backend: "auto", "torch", "openvino", or "module:Class" for your own.
        hang_timeout_seconds: a worker with work that shows no progress for this long is replaced.
        max_respawns: processes that one worker's seat may lose in a row before the pool gives up.
        niceness: of the workers, added to that of this process.

    Attributes:
        device, hardware: the devices, as torch and as people name them; of an encoder behind HTTP
            its server, and "".
        precision: the chosen one; "http" if a server chooses it.
        start_seconds: 0 before the start.

    Raises:
        ConfigError: a device or a setting is wrong.
    """

    def __init__(
        self,
        spec: EncodingSpec | Space = EncodingSpec(),  # noqa: B008 (frozen)
        *,
        task: Task = "document",
        devices: str | Sequence[str] = "auto",
        precision: str = "auto",
        backend: str = "auto",
        hang_timeout_seconds: float = DEFAULT_HANG_TIMEOUT_SECONDS,
        max_respawns: int = 3,
        niceness: int = 0,
    ) -> None:
        if backend not in BACKENDS and ":" not in backend:
            raise ConfigError(
                f"backend is one of {', '.join(BACKENDS)} or module:Class, not {backend!r}"
            )
        self._spec: EncodingSpec | Space = spec
        self._task: Task = task
        endpoint = (spec if isinstance(spec, EncodingSpec) else spec.requested).endpoint
        self._endpoint = endpoint
        choice = choose_devices(devices) if endpoint is None else no_devices(endpoint.host)
        self._choice = choice
        self.device = choice.endpoint or ",".join(dict.fromkeys(choice.devices))
        self.hardware = choice.hardware
        self.workers = len(choice.devices)
        self.start_seconds = 0.0
        self._backend = backend
        self._niceness = niceness
        self.precision = choice.precision(precision) if endpoint is None else "http"
        self._settings = {"precision": self.precision, "threads": choice.threads}
        self._hang_timeout_seconds = hang_timeout_seconds
        self._max_respawns = max_respawns
        self._starting = threading.RLock()
        self._dispatcher: Dispatcher | None = None
        self._facts: PoolFacts | None = None
        self._speeds: SpeedRecord | None = None
        self._speed: Speed | None = None
        self._closed = False

    @cached_property
    def space(self) -> Space:
        """The vector space; to find its model, or to refuse it, no worker is started."""
        return replace(_with_folder(self._spec), task=self._task)

    @property
    def dimension(self) -> int:
        return self.space.dimension

    def start(self) -> PoolFacts:
        """Start the workers, unless they were started before, and wait until they are ready.

        Raises:
            ConfigError: the model or a setting is wrong, or vectors are below the promised cosine.
            EncoderError: the workers do not start, or the pool is closed.
        """
        with self._starting:
            if self._facts is None or self._speed is None:
                begun = time.perf_counter()
                try:
                    self._facts = self._start_workers()
                    speed = self.measure_speed()
                except BaseException:
                    self._facts = None
                    if self._dispatcher is not None:
                        self._dispatcher.close()
                    raise
                self.start_seconds = time.perf_counter() - begun
                log.info(
                    "encoder pool ready in %.1f s: %s on %s (%s), %s, %.0f texts/s",
                    self.start_seconds,
                    self.space.name,
                    self.device,
                    self._facts.device_reason,
                    self.precision,
                    speed.texts_per_second,
                )
            return self._facts

    def _start_workers(self) -> PoolFacts:
        probes = self.space.probes[:1]  # all of them are too long for a message
        space = asdict(replace(self.space, probes=probes))
        message = {"op": "load", "space": space, "backend": self._backend}
        environment = self._choice.environment | self._of_endpoint()
        seats = list[WorkerSeat]()
        for index, device in enumerate(self._choice.devices):
            load = message | {"settings": self._settings | {"device": device}}
            seats.append(WorkerSeat(index, device, load, environment, self._niceness))
        if self._closed:
            raise EncoderError("the encoder pool is closed")
        self._dispatcher = Dispatcher(seats, self._hang_timeout_seconds, self._max_respawns)
        if self._closed:  # by another thread, which may not have seen the dispatcher
            self._dispatcher.close()
        wait_in_turns(self._dispatcher.started.wait)
        ready = list(_unfailed(self._dispatcher).ready_messages.values())
        cosines = [message["lowest_cosine"] for message in ready]
        notes = tuple(dict.fromkeys(note for message in ready for note in message["notes"]))
        for note in notes:
            log.warning("%s", note)
        reasons = (self._choice.reason, self.hardware, ready[0]["detail"], *notes)
        return PoolFacts(
            **ready[0]["facts"],
            lowest_cosine=min(filter(None, cosines), default=None),
            notes=notes,
            device_reason="; ".join(filter(None, reasons)),
            calibration=Calibration(ready[0]["calibration"]),
        )

    def _of_endpoint(self) -> dict[str, str]:
        """Return the environment variables with the key of an endpoint and with proxies, which may
        have a password, for its worker."""
        if self._endpoint is None:
            return {}
        environment = {name: os.environ[name] for name in _PROXIES if name in os.environ}
        if self._endpoint.api_key_env is not None:
            environment[self._endpoint.api_key_env] = self._endpoint.api_key() or ""
        return environment

    def dispatcher(self) -> Dispatcher:
        """Return the dispatcher of the ready workers, which are started if they were not."""
        if self._facts is None:
            self.start()
        assert self._dispatcher is not None
        return _unfailed(self._dispatcher)

    @property
    def core_share(self) -> float:
        """Seconds that encoding loses to a processor second of this process; 0 if the workers
        compute on other processors."""
        computes_here = self._choice.on_cpu and self._endpoint is None
        return 1 / usable_cores() if computes_here else 0.0

    @property
    def calibration(self) -> Calibration:
        return (self._facts or self.start()).calibration

    @property
    def speed(self) -> Speed:
        self.start()
        assert self._speed is not None
        return self._speed

    def measure_speed(self, *, anew: bool = False) -> Speed:
        """Return `speed`, measured if it never was, or `anew`, which forgets what runs showed."""
        if self._speeds is None:
            devices = ",".join(self._choice.devices)
            limits: dict[str, int] = {}
            if self._endpoint is not None:
                limits["most_words"] = _MOST_WORDS_OF_ENDPOINT
                limits["texts_at_once"] = self._endpoint.concurrency * self._endpoint.most_texts
            self._speeds = SpeedRecord(self.calibration, devices, self.workers, **limits)
        self._speed = self._speeds.measure(self._time, anew=anew)
        return self._speed

    def learn(self, calls: Sequence[Call]) -> None:
        """Let `speed` follow the calls of a run."""
        self.start()
        assert self._speeds is not None
        self._speed = self._speeds.learn(calls)

    @property
    def worker_pids(self) -> list[int]:
        return self._dispatcher.worker_pids() if self._dispatcher else []

    @property
    def ready_workers(self) -> int:
        return self._dispatcher.ready_workers() if self._dispatcher else 0

    @property
    def has_failed(self) -> bool:
        """Whether its workers have failed for good, so that only another pool can encode."""
        return self._dispatcher is not None and self._dispatcher.failure is not None

    def require_documents(self) -> None:
        """Raise ConfigError if the pool encodes queries, which the model treats in another way."""
        if self.space.side == "query":
            raise ConfigError(
                'the pool encodes queries; start it with task="document" for the texts of a catalog'
            )

    def arena(self, *, slots: int, max_texts: int, max_bytes: int) -> Arena:
        """Close it when its vectors are no longer needed."""
        return Arena(
            slots=slots,
            max_texts=max_texts,
            max_bytes=max_bytes,
            dimension=self.space.dimension,
            dtype=self.space.dtype,
            on_close=self.dispatcher().drop_arena,
        )

    def submit(
        self,
        slot: Slot,
        borders: np.ndarray | None = None,
        rows: np.ndarray | None = None,
        *,
        holds_ids: bool = False,
    ) -> EncodeCall:
        """Start to fill the slot's matrix with the vectors of its texts.

        Several threads may call it concurrently.

        Args:
            slot: must not be released before the call has ended.
            borders: first rows of the groups (partitions) that fail as a whole when one of their
                texts cannot be encoded, ascending, beginning with 0; None: each row is a group.
            rows: to encode, ascending; the others keep the vectors that they have. A slot has one
                such call at a time.
            holds_ids: the slot holds the token ids (int32) of each text in place of the text;
                `PoolFacts.truncation_side` says whether the workers take them.

        Raises:
            EncoderError: the pool failed; the message holds the last output of the failed worker.
        """
        dispatcher = self.dispatcher()
        call = EncodeCall(slot, self.workers, dispatcher.abandon, borders, rows, holds_ids)
        if call.rows:
            dispatcher.encode(call)
        else:
            call.done.set()
        return call

    def encode(self, slot: Slot) -> EncodeMetrics:
        """Fill the slot's matrix with the vectors of its texts.

        Raises:
            EncoderError: names a text that cannot be encoded.
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
            raise EncoderError(
                f"{len(metrics.failed)} texts cannot be encoded; row {first.row}: {first.reason}"
            )
        return metrics

    def vectors(self, texts: pa.LargeStringArray) -> np.ndarray:
        """Return float32 [n, dimension], for callers that have no arena."""
        return self._encode_copy(texts)[1]

    def close(self) -> None:
        """End the workers and wait for them; closing a pool twice is harmless."""
        self._closed = True
        if self._dispatcher is not None:
            self._dispatcher.close()

    def _encode_copy(self, texts: pa.LargeStringArray) -> tuple[Costs, np.ndarray]:
        with self.arena(
            slots=1, max_texts=max(1, len(texts)), max_bytes=max(1, texts.nbytes)
        ) as arena:
            slot = arena.acquire()
            slot.append(texts)
            costs = self.encode(slot).costs
            vectors = slot.matrix(0, len(texts)).astype(np.float32)  # a copy
            slot.release()
        return costs, vectors

    def _time(self, texts: list[str]) -> tuple[float, float]:
        """Return the tokens of `texts`, and the seconds of their call."""
        costs, _ = self._encode_copy(pa.array(texts, pa.large_string()))
        return costs.tokens, costs.encode_seconds

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unfailed(dispatcher: Dispatcher) -> Dispatcher:
    if dispatcher.failure is not None:
        raise copy.copy(dispatcher.failure)
    return dispatcher


def _with_folder(spec: EncodingSpec | Space) -> Space:
    """A space read from a space.json has no model folder and is resolved again."""
    if isinstance(spec, EncodingSpec):
        return spec.resolve()
    if spec.has_model:
        return spec
    # anyone who writes to the output may have named it
    if spec.requested.trust_remote_code is not None:
        raise ConfigError(
            f"the space {spec.name} names code of its model {spec.requested.model!r}, which is not "
            "run on the word of an output: give an EncodingSpec with trust_remote_code instead"
        )
    found = spec.requested.resolve()
    if found.name != spec.name:
        raise ConfigError(
            f"the model {spec.requested.model!r} on this machine gives the space {found.name}, not "
            f"{spec.name}: the model or its settings changed; use a new output, or the model that "
            "this output was made with"
        )
    spec.require_probes(found.probes)
    return found
