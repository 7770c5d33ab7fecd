"""The encoder of a run: settings, and the worker processes that everything in one process shares.

Dagster finds dependencies by looking at annotations while the class is created, so they must not be
strings here.
"""

import os
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Self, get_args

import dagster as dg
import numpy as np
import pyarrow as pa

from surge_dagster.config.settings import EncoderSettings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import Space


class _SharedPools:
    """The pools of equal settings in this process.

    Queries share the documents' pool, unless the model encodes them differently.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        self.holders = 0
        self._settings = settings
        self._pools: dict[Task, EncoderPool] = {}

    @cached_property
    def space(self) -> Space:
        return self._settings.encoding_spec().resolve()

    def pool(self, task: Task) -> EncoderPool:
        """Return the pool for a task; its workers start with the first call that needs them."""
        side = replace(self.space, task=task).side

        with _LOCK:
            pool = self._pools.get(side)
            if pool is None:
                pool = self._settings.pool_of_run(self.space, side)
                self._pools[side] = pool
            return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


# Reentrant: the garbage collector may end a terminated run's hold inside any statement.
_LOCK = threading.RLock()
# By process id, because a forked child cannot use its parent's workers, and by settings.
_SHARED: dict[tuple[int, str], _SharedPools] = {}


class EncoderResource(EncoderSettings, dg.ConfigurableResource):
    """Encodes texts into the vector space of its settings, with worker processes.

        @dg.asset(pool="gpu")
        def slogans(encoder: EncoderResource) -> None:
            vectors = encoder.encode(["steel bottle", "straw hat"])  # float32, [2, dimension]
            queries = encoder.encode(["cold drinks"], task="query")  # float32, [1, dimension]
            print(encoder.space.name, vectors @ queries.T)

    The workers start with the first text. Everything in one process that uses the resource with
    the same settings shares them, runs of `embeddings` included. They end with the last run that
    has the resource, whether it succeeds, fails or is terminated. Outside of a run each call of
    `encode` starts and ends them; keep them for several calls with `with encoder.pool(): ...`.
    """

    @property
    def space(self) -> Space:
        """The vector space, such as `space.name` and `space.dimension`. No worker is started.

        Raises:
            ConfigError: the model cannot be used.
        """
        with self._hold() as shared:
            return shared.space

    def encode(self, texts: Iterable[str], task: Task = "document") -> np.ndarray:
        """Return the vectors of texts in their order, float32 [texts, dimension].

        The prompt of the task is put before each text. A text that is longer than the model reads
        is cut, as in a run. Without texts no worker is started, and the result has the shape
        [0, dimension].

        Args:
            task: "document" for vectors like those of the catalog, "query" to search them.

        Raises:
            ConfigError: one of the texts is not a str, or the task, model or device cannot be used.
            EncoderError: the workers do not start or fail for good, or a text cannot be encoded.
        """
        _require_task(task)
        column = _column(texts)

        with self._hold() as shared:
            if not len(column):
                return np.empty((0, shared.space.dimension), np.float32)
            return shared.pool(task).vectors(column)

    @contextmanager
    def pool(self, task: Task = "document") -> Generator[EncoderPool]:
        """Give the shared `EncoderPool` for a block, for `search` and whatever else takes a pool.

        The block must not close it.
        """
        _require_task(task)
        with self._hold() as shared:
            yield shared.pool(task)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Generator[Self]:
        """Keep the workers until the run ends, or the step if each step is a process."""
        with self._hold():
            yield self

    @contextmanager
    def _hold(self) -> Generator[_SharedPools]:
        """Share the pools of equal settings for a block; the last holder closes them."""
        key = (os.getpid(), self.model_dump_json())
        with _LOCK:
            shared = _SHARED.setdefault(key, _SharedPools(self))
            shared.holders += 1
        try:
            yield shared
        finally:
            with _LOCK:
                shared.holders -= 1
                is_last = shared.holders == 0
                if is_last:
                    del _SHARED[key]
            # Outside of the lock: the garbage collector may end another hold in a thread that
            # `close` waits for.
            if is_last:
                shared.close()


def _require_task(task: str) -> None:
    if task not in get_args(Task):
        raise ConfigError(f"Unknown task {task!r}. Use document or query.")


def _column(texts: Iterable[str]) -> pa.LargeStringArray:
    """Return texts as the pool takes them.

    Raises:
        ConfigError: `texts` is a str, or has an element that is not a str of Unicode.
    """
    if isinstance(texts, str):
        raise ConfigError("texts is a str. Give a list of texts, as in encode([text]).")

    listed = list(texts)
    for place, text in enumerate(listed):
        if not isinstance(text, str):
            raise ConfigError(
                f"texts[{place}] is of the type {type(text).__name__}; expected a str. Leave it "
                "out or convert it."
            )
    try:
        return pa.array(listed, pa.large_string())  # pyright: ignore[reportReturnType]
    except UnicodeEncodeError as error:
        raise ConfigError(f"A text is not Unicode ({error}). Repair it or leave it out.") from None
