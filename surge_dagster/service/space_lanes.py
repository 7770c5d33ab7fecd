"""The lanes of one model: a pool for queries that is loaded and warm, and one for documents,
started when it is needed.

Both lanes load the model of the space on record, through the request that made it, and refuse
another tokenizer, as `search` does. Documents have workers of their own also where they are encoded
as queries are: workers of a higher niceness leave queries their share of the cores, and a pool that
is not started before documents come holds no memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import read_document
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import model_difference
from surge_dagster.engine.support.waiting import in_background, result_of
from surge_dagster.service.lane import Lane, LaneCounts
from surge_dagster.service.promise import (
    QUERY_NICENESS,
    Promise,
    bulk_niceness,
    kept_share,
)
from surge_dagster.service.tokens import TokenCounter

log = logging.getLogger(__name__)

_SATURATION_TOKENS = 1_024  # of a backend that does not say how many fill a pass
# A longer text has a pass of its own: the passes of a model that reads more are not made longer for
# it.
_LONGEST_TEXT_TOKENS = 4_096
# full passes in one of the bulk lane, which wins more by texts of equal length than it loses by
# waits
_BULK_PASSES = 8
# A query worker without progress for so many seconds, and full passes, is replaced.
_HANG_SECONDS, _HANG_PASSES = 5.0, 10
_MAX_RESPAWNS = 9  # in a row: a pool for life forgives more than a run's


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """How the lanes of all spaces are made.

    Attributes:
        devices, precision, backend: see `EncoderPool`.
        trust_remote_code: of models that spaces on record name, see `EncodingSpec`; other code is
            not run.
        promised_seconds: of query lanes; None is what two waiting passes need, as they were timed
            at the start.
        bulk_share: of a CPU, that documents keep beside queries; of a GPU they keep half.

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


class SpaceLanes:
    """The lanes that encode for a space, and for all that are derived from the same vectors.

    Args:
        space: as the output has it.
        counts: of lanes, by the name of their space and their side; theirs are added.

    Attributes:
        sha256: `encoder_sha256` of all spaces that these lanes encode for.
        matryoshka_dimensions: that the model's configuration says it was trained for, if it does.
    """

    queries: Lane
    documents: Lane
    matryoshka_dimensions: list[int]

    def __init__(
        self, space: Space, settings: LaneSettings, counts: dict[tuple[str, Task], LaneCounts]
    ) -> None:
        self.sha256 = space.encoder_sha256
        self._space, self._settings, self._counts = space, settings, counts
        self._pools: list[EncoderPool] = []
        self._is_closed = False

    def start(self, *, keep_promise: bool = True) -> None:
        """Load the model for queries, time its passes, and make both lanes.

        Args:
            keep_promise: whether a promise that cannot be kept is an error; else the smallest that
                can is made.

        Raises:
            ConfigError: the model or its tokenizer is not that of the space, or cannot be used
                here; see `Promise.promising` too.
            EncoderError: the workers do not start, or `close` was called.
        """
        pool = self._pool(self._trusted_request(), task="query", niceness=QUERY_NICENESS)
        model = pool.space
        if model.spec_sha256 != self.sha256:
            raise ConfigError(
                f"the model {model.requested.model!r} encodes into {model.name}, not into {self._space.name}: "
                f"{model_difference(model, self._space)}. Restore it"
            )
        facts = pool.start()
        counter = TokenCounter(model, facts.tokenizer, pool.speed)
        longest_text = min(model.max_length, _LONGEST_TEXT_TOKENS)
        pass_tokens = max(facts.saturation_tokens or _SATURATION_TOKENS, longest_text)
        promise = self._promise(pool, pass_tokens, keep_promise)
        pool.dispatcher().hang_timeout_seconds = max(
            _HANG_SECONDS, _HANG_PASSES * promise.full_pass_seconds
        )
        self.queries = self._lane(pool, counter, promise.pass_tokens, promise)
        self.queries.start()
        niceness = bulk_niceness(self._settings.bulk_share)
        # Queries may have a tokenizer of their own; what documents' workers load is compared when
        # they start.
        counter = TokenCounter(
            replace(model, task="document"), facts.tokenizer or self._space.tokenizer, pool.speed
        )

        def documents() -> Lane:
            return self._lane(
                self._pool(model, niceness=niceness), counter, _BULK_PASSES * pass_tokens
            )

        self._new_documents, self.documents = documents, documents()
        self.matryoshka_dimensions = _matryoshka_dimensions(model)

    def renew_documents(self) -> Lane:
        """Put a lane that starts anew in place of the one for documents, which the caller closes."""
        old, self.documents = self.documents, self._new_documents()
        self._pools.remove(old.pool)
        return old

    def _trusted_request(self) -> EncodingSpec:
        request, trusted = self._space.loadable, self._settings.trust_remote_code
        if request.trust_remote_code not in (None, trusted):
            raise ConfigError(
                f"the space {self._space.name} names code of the model {request.model!r}, which is not run on the word "
                f"of an output. If you trust that code, start with trust_remote_code {request.trust_remote_code}"
            )
        return request

    def _pool(self, spec: EncodingSpec | Space, **options: Any) -> EncoderPool:
        settings = {
            name: getattr(self._settings, name) for name in ("devices", "precision", "backend")
        }
        pool = EncoderPool(spec, max_respawns=_MAX_RESPAWNS, **settings, **options)
        self._pools.append(pool)
        if self._is_closed:  # by another thread, which may not have seen the pool
            pool.close()
        return pool

    def _lane(
        self,
        pool: EncoderPool,
        counter: TokenCounter,
        pass_tokens: int,
        promise: Promise | None = None,
    ) -> Lane:
        counts = self._counts.setdefault((pool.space.name, pool.space.task), LaneCounts())
        return Lane(pool, self._space, counter, pass_tokens, promise, counts=counts)

    def _promise(self, pool: EncoderPool, pass_tokens: int, keep_promise: bool) -> Promise:
        share = kept_share(pool.all_devices, self._settings.bulk_share)
        wanted = self._settings.promised_seconds
        promise = Promise((1 - share) * pool.speed.tokens_per_second, pass_tokens, 0.0)
        if not keep_promise and wanted is not None and wanted < promise.smallest_seconds:
            log.warning(
                "%s promises %.0f ms: less cannot be kept",
                self._space.name,
                1000 * promise.smallest_seconds,
            )
            wanted = promise.smallest_seconds
        return promise.promising(wanted)

    @property
    def last_accepted_at(self) -> float:
        """When a request came last, on the monotonic clock."""
        return max(self.queries.last_accepted_at, self.documents.last_accepted_at)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Close both lanes, which are drained at the same time; a start that is under way fails
        soon."""
        self._is_closed = True
        lanes = [getattr(self, name) for name in ("queries", "documents") if hasattr(self, name)]
        for closed in [
            in_background(partial(lane.close, drain_seconds), "surge-close-lane") for lane in lanes
        ]:
            result_of(closed)
        for pool in list(self._pools):
            pool.close()


def _matryoshka_dimensions(space: Space) -> list[int]:
    """Few models say it. sentence-transformers keeps it in the model card alone, which is written
    for people."""
    config = read_document(Path(space.model_path) / "config.json") if space.model_path else None
    stated = (config or {}).get("matryoshka_dimensions")
    return [size for size in stated if isinstance(size, int)] if isinstance(stated, list) else []
