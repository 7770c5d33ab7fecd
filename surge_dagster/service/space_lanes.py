"""The lanes of one model: a pool for queries that is loaded and warm, and one for documents that
starts with the first request.

Both load the model of the space on record, through the request that made it, and refuse another
tokenizer, as `search` does. Documents have workers of their own even if they are encoded as queries
are: workers of a higher niceness leave queries their share of the cores.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from surge_dagster.engine.encoder.pool import (
    DEFAULT_HANG_TIMEOUT_SECONDS,
    EncoderPool,
)
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.spaces import model_difference
from surge_dagster.service.lane import Lane, TextTokens
from surge_dagster.service.promise import Promise

log = logging.getLogger(__name__)

_SATURATION_TOKENS = 1_024  # of a backend that does not say how many saturate it
# A full pass of queries has a quarter of these tokens: it is nearly as fast, and ends sooner.
_PASSES_OF_SATURATION = 4
# A longer text has a pass of its own: it does not make the other passes longer.
_LONGEST_TEXT_TOKENS = 4_096
# In a pass of documents, which wins more by texts of equal length than it loses by waits.
_BULK_PASSES = 8
_HANG_SECONDS = 15.0  # without progress, after which a worker for queries is replaced
_MAX_RESPAWNS = 9  # in a row: a pool for life forgives more than a run's
# Weights of the kernel's scheduler: each step of niceness divides the share by 1.25.
_NICE_STEP = 1.25
# Of workers for queries: the process that answers and refuses requests comes first.
QUERY_NICENESS = 4
_LEAST_SHARE = 0.035  # less, the scheduler does not give
_MOST_SHARE = 0.5


def bulk_niceness(bulk_share: float) -> int:
    """Return the highest niceness at which workers get at least this share of a core during
    queries.

    Raises:
        ConfigError: the share is out of its range.
    """
    if not _LEAST_SHARE <= bulk_share <= _MOST_SHARE:
        raise ConfigError(
            f"The share of bulk work is {bulk_share:g}. Use {_LEAST_SHARE:g} to {_MOST_SHARE:g}."
        )
    return QUERY_NICENESS + int(math.log((1 - bulk_share) / bulk_share, _NICE_STEP) + 1e-9)


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """How the lanes of all spaces are made.

    Attributes:
        devices, precision, backend: see `EncoderPool`.
        trust_remote_code: of models that spaces on record name, see `EncodingSpec`; other code is
            not run.
        promised_seconds: of query lanes; None follows from the pool's `Speed`.
        bulk_share: of a CPU, that documents keep during queries; of a GPU they keep half.

    Raises:
        ConfigError: the share is out of its range.
    """

    devices: str = "auto"
    precision: str = "auto"
    backend: str = "auto"
    trust_remote_code: str | None = None
    promised_seconds: float | None = None
    bulk_share: float = 0.1

    def __post_init__(self) -> None:
        bulk_niceness(self.bulk_share)

    def pool(self, space: Space, task: Task, *, is_bulk: bool = False) -> EncoderPool:
        """Return a pool, which is not started, with the model of a space on record.

        Args:
            is_bulk: whether queries are bulk work, too.

        Raises:
            ConfigError: the model is not that of the space, or cannot be used here.
        """
        request = space.loadable
        if request.trust_remote_code not in (None, self.trust_remote_code):
            raise ConfigError(
                f"The space {space.name} names code of the model {request.model!r}, which is not "
                "run because an output says so. If you trust that code, start with "
                f"trust_remote_code {request.trust_remote_code}."
            )
        niceness = bulk_niceness(self.bulk_share)
        hang_seconds = DEFAULT_HANG_TIMEOUT_SECONDS
        if task == "query" and not is_bulk:
            niceness = QUERY_NICENESS
            hang_seconds = _HANG_SECONDS
        pool = EncoderPool(
            request,
            task=task,
            devices=self.devices,
            precision=self.precision,
            backend=self.backend,
            hang_timeout_seconds=hang_seconds,
            max_respawns=_MAX_RESPAWNS,
            niceness=niceness,
        )
        if pool.space.spec_sha256 != space.encoder_sha256:
            raise ConfigError(
                f"The model {request.model!r} encodes into {pool.space.name}, not into "
                f"{space.name}: {model_difference(pool.space, space)}. Restore it."
            )
        return pool


@dataclass(frozen=True, slots=True)
class SpaceLanes:
    """The lanes of a space, and of all spaces that are derived from the same vectors."""

    queries: Lane
    documents: Lane

    def close(self, drain_seconds: float = 0.0) -> None:
        """Drain both lanes at the same time, and close them."""
        with ThreadPoolExecutor(2) as threads:
            threads.submit(self.queries.close, drain_seconds)
            threads.submit(self.documents.close, drain_seconds)


def start_lanes(space: Space, settings: LaneSettings) -> SpaceLanes:
    """Load the model of a space on record for queries, and make both lanes.

    Raises:
        ConfigError: see `LaneSettings.pool`; or the model has another tokenizer than that of the
            space.
        EncoderError: the workers do not start.
    """
    new_queries = partial(settings.pool, space, "query")
    new_documents = partial(settings.pool, space, "document")
    pool = new_queries()
    bulk_pool = new_documents()
    try:
        facts = pool.start()
        space.require_tokenizer(facts.tokenizer)
        pool.vectors(pa.array(["the first text of a worker takes longer"], pa.large_string()))
    except BaseException:
        pool.close()
        raise

    longest_text = min(pool.space.max_length, _LONGEST_TEXT_TOKENS)
    saturation = facts.saturation_tokens or _SATURATION_TOKENS
    pass_tokens = max(saturation // _PASSES_OF_SATURATION, longest_text)
    bulk_tokens = _BULK_PASSES * max(saturation, longest_text)
    promise = _promise(pool, pass_tokens, settings)
    tokenize = TextTokens(pool.space, facts)
    bulk_tokenize = TextTokens(bulk_pool.space, facts)  # the workers of both lanes are of one kind
    queries = Lane(pool, new_queries, tokenize, pass_tokens, promise, recorded=space)
    documents = Lane(bulk_pool, new_documents, bulk_tokenize, bulk_tokens, recorded=space)
    queries.start()
    return SpaceLanes(queries, documents)


def _promise(pool: EncoderPool, pass_tokens: int, settings: LaneSettings) -> Promise:
    speed = pool.speed
    seconds = float(speed.seconds(pass_tokens / speed.tokens_per_text, pass_tokens))
    # Niceness divides a CPU; a GPU gives two processes equal slices of time.
    bulk_share = 0.5 if pool.device.startswith("cuda") else settings.bulk_share
    promise = Promise(
        (1 - bulk_share) * pass_tokens / seconds, pass_tokens, settings.promised_seconds
    )
    if promise.promised_seconds != (promise.wanted_seconds or promise.promised_seconds):
        log.warning(
            "%s promises %.0f ms: less cannot be kept",
            pool.space.name,
            1000 * promise.promised_seconds,
        )
    return promise
