"""One encode call as its caller sees it: EncodeCall waits for it, EncodeMetrics says what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from surge_dagster.engine.encoder.quarantine import FailedRow
from surge_dagster.engine.encoder.schedule import Job
from surge_dagster.engine.support.waiting import wait_in_turns


@dataclass(frozen=True, slots=True)
class EncodeMetrics:
    """The costs of one encode call.

    Attributes:
        texts: rows that were encoded.
        tokens: tokens of these rows, after truncation.
        padded_tokens: computed tokens, padding included.
        truncated: rows that were longer than the model reads.
        encode_seconds: from the first assigned chunk, or the end of the call before, to the last answer.
        chunks: that workers encoded.
        work_seconds: of each chunk, from its assignment or the answer to the one before; summed over workers.
        tokenize_seconds, forward_seconds: summed over workers.
        copy_seconds: copies between host and device and into place, summed over workers; part of forward_seconds.
        workers: number of workers of the pool.
        replays: chunks that were encoded again because their worker was lost.
        failed: texts that ended every worker that encoded them, one of each group (see `EncoderPool.submit`).
        gpu_utilisation: mean over devices and time, 0 to 1; None where nothing measures it.
        gpu_memory_bytes: maximum in use on all devices together; None where nothing measures it.
    """

    texts: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    truncated: int = 0
    encode_seconds: float = 0.0
    chunks: int = 0
    work_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    forward_seconds: float = 0.0
    copy_seconds: float = 0.0
    workers: int = 1
    replays: int = 0
    failed: tuple[FailedRow, ...] = ()
    gpu_utilisation: float | None = None
    gpu_memory_bytes: int | None = None

    @property
    def shared_seconds(self) -> float:
        """What the call takes of a pool that has other calls as well, so that no worker waits for the last one.

        Tokenizing and computing divide among workers; what the message of a lone chunk takes does not.
        """
        if self.workers == 1:
            return self.encode_seconds
        computing = min(self.work_seconds, self.tokenize_seconds + self.forward_seconds)
        busy = max(1, min(self.workers, self.chunks))
        return computing / self.workers + (self.work_seconds - computing) / busy

    def plus(self, later: EncodeMetrics) -> EncodeMetrics:
        """Of two calls for one slot, one after the other."""
        sums = {name: getattr(self, name) + getattr(later, name) for name in _ADDED_UP}
        used = [found for found in (self.gpu_memory_bytes, later.gpu_memory_bytes) if found is not None]
        return replace(self, **sums, gpu_memory_bytes=max(used, default=None))


_ADDED_UP = (
    "texts",
    "tokens",
    "padded_tokens",
    "truncated",
    "encode_seconds",
    "chunks",
    "work_seconds",
    "tokenize_seconds",
    "forward_seconds",
    "copy_seconds",
    "replays",
    "failed",
)


class EncodeCall:
    """The caller's view of a call under way. Made by `EncoderPool.submit`."""

    def __init__(self, job: Job, workers: int, abandon: Callable[[Job], None]) -> None:
        self._job = job
        self._workers = workers
        self._abandon = abandon

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """Waits for the end of the call; None after the timeout. Can be called again.

        Raises:
            EncoderError: the pool failed; the message holds the last output of the failed worker.
        """
        if not wait_in_turns(self._job.done.wait, timeout_seconds):
            return None
        if self._job.error is not None:
            raise copy_of(self._job.error)
        return self.metrics

    def abandon(self) -> None:
        """Ends the call without encoding further rows; `encoded` lists the rows that have vectors.

        Workers finish the chunks that they have, and these keep the slot from being used again until then, but this
        method does not wait for them.
        """
        self._abandon(self._job)
        wait_in_turns(self._job.done.wait)

    @property
    def encoded(self) -> list[tuple[int, int]]:
        """Ranges of rows that have their vectors, ascending, without overlap; of a call for some rows, their places."""
        return sorted(self._job.encoded)

    @property
    def metrics(self) -> EncodeMetrics:
        """The costs so far."""
        job = self._job
        samples = job.gpu_samples
        return EncodeMetrics(
            texts=job.rows,
            encode_seconds=job.encode_seconds,
            workers=self._workers,
            replays=job.replays,
            failed=job.failed,
            gpu_utilisation=sum(rate for rate, _ in samples) / len(samples) if samples else None,
            gpu_memory_bytes=max(used for _, used in samples) if samples else None,
            **job.sums,
        )


def copy_of(error: Exception) -> Exception:
    """The same error as a new object: several threads may raise it, and each adds its own traceback."""
    return type(error)(str(error))
