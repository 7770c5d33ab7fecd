"""ServedSpaces: the spaces of an output that the service answers for, which follow its switches.

Two spaces are served: the current one, and the next one, which is the newest space that was current
neither before the last switch nor since the service began. So a switch finds its lanes warm. Spaces
that are there at the start count as begun in the order of their names: an output does not say when.

A thread looks at the output twice a second, and at a bucket every five seconds. From the moment at
which it has seen a switch, `current` is the new space. Until its model is loaded, requests for it
are answered with 503.

The same thread replaces a lane whose pool has given up, at once, but not within a minute of the
last time: a pool that fails again and again is not loaded without a pause.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived.conversion import cut
from surge_dagster.engine.encoder.pool import DEFAULT_HANG_TIMEOUT_SECONDS, EncoderPool, PoolFacts
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import read_current, space_of_readers
from surge_dagster.engine.output.spaces import list_spaces, require_model
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.waiting import every
from surge_dagster.service.errors import Refusal
from surge_dagster.service.lane import Lane, Promise, promise_of

log = logging.getLogger(__name__)

CURRENT = "current"
_LOOK_SECONDS = 0.5
_REMOTE_LOOK_SECONDS = 5.0  # each look is a request per space
_CLOSING_SECONDS = 30.0  # for the answers of lanes that end
_TRY_AGAIN_SECONDS = 2.0  # a client whose space is not loaded
_LOAD_AGAIN_SECONDS = 60.0
_MEASURE_AGAIN_SECONDS = 30.0
_SATURATION_TOKENS = 1_024  # of a backend that does not say how many saturate it
# A full pass of queries has a quarter of these tokens: it is nearly as fast, and ends sooner.
_PASSES_OF_SATURATION = 4
# A longer text has a pass of its own: it does not make the other passes longer.
_LONGEST_TEXT_TOKENS = 4_096
# In a pass of documents, which wins more by texts of equal length than it loses by waits.
_BULK_PASSES = 8
_HANG_SECONDS = 15.0  # without progress, after which a worker for queries is replaced
_MAX_RESPAWNS = 9  # in a row: a pool for life forgives more than a run's
# Of workers for queries: the process that answers and refuses requests comes first.
QUERY_NICENESS = 4
# Leaves other workers a tenth of a CPU during queries: a step of niceness divides a share by 1.25.
_BULK_NICENESS = QUERY_NICENESS + 9
_QUERY_SHARE_OF_CPU = 0.9
_QUERY_SHARE_OF_GPU = 0.5  # which gives two processes equal slices of time


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """How the lanes of all spaces are made.

    Attributes:
        devices, precision, backend: see `EncoderPool`.
        trust_remote_code: of models that spaces on record name, see `EncodingSpec`; other code is
            not run.
        promised_seconds: of query lanes; None follows from the pool's `Speed`.
    """

    devices: str = "auto"
    precision: str = "auto"
    backend: str = "auto"
    trust_remote_code: str | None = None
    promised_seconds: float | None = None

    def pool(self, space: Space, task: Task, *, is_bulk: bool = False) -> EncoderPool:
        """Return a pool, which is not started, with the model of a space on record.

        Args:
            is_bulk: whether queries are bulk work, too.

        Raises:
            ConfigError: the model is not that of the space, or cannot be used here.
        """
        request = space.loadable
        if request.endpoint is not None:
            raise ConfigError(
                f"The space {space.name} has the vectors of an encoder behind HTTP, and the "
                "service needs a local model. Send queries to that encoder."
            )
        if request.trust_remote_code not in (None, self.trust_remote_code):
            raise ConfigError(
                f"The space {space.name} names code of the model {request.model!r}, which is not "
                "run because an output says so. If you trust that code, start with "
                f"trust_remote_code {request.trust_remote_code}."
            )
        niceness = _BULK_NICENESS
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
        require_model(pool.space, space)
        return pool


@dataclass(frozen=True, slots=True)
class SpaceLanes:
    """The lanes of a model: a warm one for queries, and one for documents, whose pool starts with
    the first request.

    Documents have workers of their own even if they are encoded as queries are: workers of a higher
    niceness leave queries their share of the cores.
    """

    queries: Lane
    documents: Lane

    def close(self, drain_seconds: float = 0.0) -> None:
        """Drain both lanes, and close them."""
        self.queries.close(drain_seconds)
        self.documents.close(drain_seconds)


def start_lanes(space: Space, settings: LaneSettings) -> SpaceLanes:
    """Load the model of a space on record for queries, and make both lanes.

    The model is loaded through the request that made the space, and another tokenizer is refused,
    as `search` does.

    Raises:
        ConfigError: see `LaneSettings.pool`; or the model has another tokenizer than that of the
            space.
        EncoderError: the workers do not start.
    """
    pool = settings.pool(space, "query")
    try:
        facts = pool.start()
        space.require_tokenizer(facts.tokenizer)
        pool.vectors(pa.array(["the first text of a worker takes longer"], pa.large_string()))
        documents = _documents_lane(space, settings, facts)
    except BaseException:
        pool.close()
        raise

    saturation = facts.saturation_tokens or _SATURATION_TOKENS
    longest_text = min(space.max_length, _LONGEST_TEXT_TOKENS)
    pass_tokens = max(saturation // _PASSES_OF_SATURATION, longest_text)
    promise = _promise(pool, pass_tokens, settings)
    queries = Lane(pool, facts, pass_tokens, promise, recorded=space)
    queries.start()
    return SpaceLanes(queries, documents)


def _documents_lane(space: Space, settings: LaneSettings, facts: PoolFacts) -> Lane:
    """Return the lane for documents.

    Args:
        facts: of a pool for queries, whose workers are of the same kind.
    """
    pool = settings.pool(space, "document")
    saturation = facts.saturation_tokens or _SATURATION_TOKENS
    longest_text = min(space.max_length, _LONGEST_TEXT_TOKENS)
    pass_tokens = _BULK_PASSES * max(saturation, longest_text)
    return Lane(pool, facts, pass_tokens, recorded=space)


def _promise(pool: EncoderPool, pass_tokens: int, settings: LaneSettings) -> Promise:
    speed = pool.speed
    tokens_per_text = max(1.0, speed.tokens_per_text)  # a static model counts no tokens
    seconds = float(speed.seconds(pass_tokens / tokens_per_text, pass_tokens))
    share = _QUERY_SHARE_OF_CPU
    if pool.device.startswith("cuda"):
        share = _QUERY_SHARE_OF_GPU
    rate = share * pass_tokens / seconds
    promise = promise_of(rate, pass_tokens, settings.promised_seconds, share)
    if promise.wanted_seconds is not None and promise.is_raised:
        log.warning(
            "%s promises %.0f ms: less cannot be kept, as fast as this machine was when it was "
            "measured. It is measured again while no query waits, and passes that are faster lower "
            "the promise",
            pool.space.name,
            1000 * promise.promised_seconds,
        )
    return promise


@dataclass(frozen=True, slots=True)
class ServedSpace:
    """A space whose lanes are loaded.

    Attributes:
        space: as on record, maybe a derived one.
        queries, documents: encode into the space, or into the one that it is derived from.
        dimensions: that vectors can be cut to, in falling order; the first is the space's own.
    """

    space: Space
    queries: Lane
    documents: Lane
    state: Literal["current", "next"]
    dimensions: tuple[int, ...]


def converted(space: Space, vectors: np.ndarray, dimensions: int | None = None) -> np.ndarray:
    """Return the model's vectors as float32 with the dimensions of the space, or fewer, cut as in
    files.

    Vectors of the space's own type, such as int8, are compared with these, as `search` does.
    """
    return cut(vectors, replace(space, dimension=dimensions or space.dimension))


class ServedSpaces:
    """The served spaces of an output. Use `with`, which closes them.

    Args:
        settings: of their lanes.

    Attributes:
        served: spaces with loaded lanes, the current one first.
    """

    def __init__(self, store: Store, settings: LaneSettings) -> None:
        self.store = store
        self.settings = settings
        self._following = ExitStack()
        self._listed: dict[str, Space] = {}  # by name, in the order in which they were seen first
        self._were_current = set[str]()  # their `encoder_sha256`
        self._wanted: list[Space] = []  # the current space first
        self._lanes: dict[str, SpaceLanes] = {}  # ready, by `encoder_sha256`
        self._load_again_at: dict[str, float] = {}  # if they fail
        self._measure_again_at = 0.0
        self.served: list[ServedSpace] = []
        self._is_closed = False

    def start(self) -> None:
        """Load the current space, wait until its query lane is warm, and follow the output from
        then on.

        Raises:
            ConfigError: the output has no current space, or its model cannot be used here.
            EncoderError: the workers do not start.
        """
        self._look()
        self._load(self._wanted[0])
        seconds = _REMOTE_LOOK_SECONDS if self.store.is_remote else _LOOK_SECONDS
        self._following.enter_context(every(seconds, self._follow, "surge-served-spaces"))

    def find(self, model: str) -> ServedSpace:
        """Return the space of this name or model, the current one first.

        Raises:
            Refusal: it is not served, or its model is not loaded yet.
        """
        wanted = self._wanted
        for space in wanted:
            if model in (CURRENT, space.name, space.requested.model):
                return self._ready(space)
        names = [CURRENT, *(space.name for space in wanted)]
        names += [space.requested.model for space in wanted]
        message = f"The model {model!r:.100} is not served. Use {', '.join(names)}."
        raise Refusal(404, "model_not_found", message, "model")

    @property
    def is_ready(self) -> bool:
        """Whether the current space is loaded and its query lane has a worker."""
        return any(each.state == CURRENT and each.queries.is_alive for each in self.served)

    @property
    def is_alive(self) -> bool:
        """Whether the query lane of the current space has a worker; one that is being loaded does
        not count."""
        is_loading = not any(each.state == CURRENT for each in self.served)
        return not self._is_closed and (is_loading or self.is_ready)

    def __enter__(self) -> ServedSpaces:
        return self

    def __exit__(self, *_: object) -> None:
        """End all workers; those that are being loaded end later."""
        self._is_closed = True
        self._following.close()
        for lanes in self._lanes.values():
            lanes.close()

    def _ready(self, space: Space) -> ServedSpace:
        for served in self.served:
            if served.space.name == space.name:
                return served
        message = (
            f"The space {space.name} is not ready: its model is being loaded, or cannot be loaded, "
            "and the service's log says why. Send the request again later."
        )
        raise Refusal(503, "space_loading", message, "model", _TRY_AGAIN_SECONDS)

    # Below runs in the following thread, and before it begins.

    def _follow(self) -> None:
        self._look()  # what is served stays so if it raises
        self._close_unwanted()
        if time.monotonic() >= self._measure_again_at:
            self._measure_again_at = time.monotonic() + _MEASURE_AGAIN_SECONDS
            for lanes in self._lanes.values():
                lanes.queries.measure_if_idle()
        for space in self._wanted:
            lanes = self._lanes.get(space.encoder_sha256)
            load_again_at = self._load_again_at.get(space.encoder_sha256, 0.0)
            has_lanes = lanes is not None and not lanes.documents.pool.has_failed
            if not has_lanes and time.monotonic() >= load_again_at:
                try:
                    self._load(space)
                except Exception as error:
                    log.warning("the space %s cannot be loaded: %s", space.name, str(error))

    def _look(self) -> None:
        """Read which spaces the output has, and decide which of them are wanted."""
        pointer = read_current(self.store)
        listed = {space.name: space for space in list_spaces(self.store)}
        current = listed.get(pointer.space) if pointer else None
        if current is None:
            current = space_of_readers(self.store)
        previous = listed.get(pointer.previous or "") if pointer else None
        known = {name: listed[name] for name in self._listed if name in listed}
        self._listed = known | listed
        self._were_current |= {each.encoder_sha256 for each in (current, previous) if each}
        new = list[Space]()
        for space in self._listed.values():
            if space.encoder_sha256 not in self._were_current:
                new.append(space)
        self._wanted = [current, *new[-1:]]
        self._publish()

    def _load(self, space: Space) -> None:
        """Start the lanes of a space, or replace the one for documents, which has failed."""
        self._load_again_at[space.encoder_sha256] = time.monotonic() + _LOAD_AGAIN_SECONDS
        lanes = self._lanes.get(space.encoder_sha256)
        if lanes is None:
            lanes = start_lanes(space, self.settings)
        else:
            lanes.documents.close()
            facts = lanes.queries.pool.start()
            lanes = replace(lanes, documents=_documents_lane(space, self.settings, facts))
        self._lanes[space.encoder_sha256] = lanes
        if self._is_closed:
            lanes.close()
        self._publish()

    def _close_unwanted(self) -> None:
        """Close the lanes of other spaces, and those without queries, which are loaded again."""
        wanted = {space.encoder_sha256 for space in self._wanted}
        for sha256, lanes in list(self._lanes.items()):
            if sha256 not in wanted or lanes.queries.pool.has_failed:
                del self._lanes[sha256]
                lanes.close(_CLOSING_SECONDS)
        for sha256 in self._load_again_at.keys() - wanted:  # else a switch back would wait
            del self._load_again_at[sha256]

    def _publish(self) -> None:
        served = list[ServedSpace]()
        for space in self._wanted:
            lanes = self._lanes.get(space.encoder_sha256)
            if lanes is not None:
                state = "current" if space is self._wanted[0] else "next"
                dimensions = self._dimensions(space)
                served.append(ServedSpace(space, lanes.queries, lanes.documents, state, dimensions))
        self.served = served

    def _dimensions(self, space: Space) -> tuple[int, ...]:
        """Return those of the space, and of spaces that were cut from the same vectors."""
        found = {space.dimension}
        for other in self._listed.values():
            is_cut = other.dtype in ("float32", "float16") and other.dimension < space.dimension
            if is_cut and other.encoder_sha256 == space.encoder_sha256:
                found.add(other.dimension)
        return tuple(sorted(found, reverse=True))
