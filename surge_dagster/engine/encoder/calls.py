"""One encode call as its caller sees it: wait for it, give it up, and read what it cost."""

from __future__ import annotations

from dataclasses import dataclass

from surge_dagster.engine.encoder.chunks import Job
from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.isolation import FailedRow
from surge_dagster.engine.support.waiting import wait_in_turns


@dataclass(frozen=True, slots=True)
class EncodeFigures:
    """What one encode call cost.

    Attributes:
        texts: rows of the call.
        tokens: tokens of these rows, after truncation.
        padded_tokens: tokens computed, padding included.
        truncated: rows that were longer than the model reads.
        encode_seconds: from the first chunk handed out, or the end of the call before, to the last answer.
        tokenize_seconds, forward_seconds: summed over workers.
        copy_seconds: copies between host and device and into place, summed over workers; part of forward_seconds.
        workers: of the pool.
        replays: chunks that were done again because their worker was lost.
        failed: texts that ended every worker they met; one of each group (see `EncoderPool.submit`).
        gpu_utilisation: mean over devices and time, 0 to 1; None where nothing measures it.
        gpu_memory_bytes: the most that was in use on all devices together; None likewise.
    """

    texts: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    truncated: int = 0
    encode_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    forward_seconds: float = 0.0
    copy_seconds: float = 0.0
    workers: int = 1
    replays: int = 0
    failed: tuple[FailedRow, ...] = ()
    gpu_utilisation: float | None = None
    gpu_memory_bytes: int | None = None


class EncodeCall:
    """A call under way. Made by `EncoderPool.submit`."""

    def __init__(self, job: Job, dispatcher: Dispatcher, workers: int) -> None:
        self._job = job
        self._dispatcher = dispatcher
        self._workers = workers

    def result(self, timeout_seconds: float | None = None) -> EncodeFigures | None:
        """Waits for the end; None when that does not come within the timeout. Repeatable.

        Raises:
            EncoderError: the pool cannot go on; it holds the last words of the worker that failed.
        """
        if not wait_in_turns(self._job.done.wait, timeout_seconds):
            return None
        if self._job.error is not None:
            raise as_new(self._job.error)
        return self.figures

    def abandon(self) -> None:
        """Ends the call with what it has: nothing more is handed out; `encoded` says which rows are there.

        Rows that a worker is busy with are finished, and keep the slot from being used again until then, but are not
        waited for.
        """
        self._dispatcher.abandon(self._job)
        wait_in_turns(self._job.done.wait)

    @property
    def encoded(self) -> list[tuple[int, int]]:
        """Ranges of rows that have their vectors, ascending, without overlap."""
        return sorted(self._job.encoded)

    @property
    def figures(self) -> EncodeFigures:
        """What it has cost so far."""
        job = self._job
        sums = job.figures
        samples = job.gpu_samples
        return EncodeFigures(
            texts=job.rows,
            tokens=int(sums.get("tokens", 0)),
            padded_tokens=int(sums.get("padded_tokens", 0)),
            truncated=int(sums.get("truncated", 0)),
            encode_seconds=job.encode_seconds,
            tokenize_seconds=sums.get("tokenize_seconds", 0.0),
            forward_seconds=sums.get("forward_seconds", 0.0),
            copy_seconds=sums.get("copy_seconds", 0.0),
            workers=self._workers,
            replays=job.replays,
            failed=job.failed,
            gpu_utilisation=sum(rate for rate, _ in samples) / len(samples) if samples else None,
            gpu_memory_bytes=max(used for _, used in samples) if samples else None,
        )


def as_new(error: Exception) -> Exception:
    """The same error as a new object: several threads may raise it, and each adds its own traceback."""
    return type(error)(str(error))
