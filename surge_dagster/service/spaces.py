"""ServedSpaces: the spaces of an output that the service answers for, which follow its switches.

The lanes of the current space are loaded, and those of the newest other one, so that a switch to it
finds them warm. Those that are there at the start count as begun in the order of their names: an
output does not say when. A space that is derived from the vectors of a loaded model needs no more
than that model. Lanes that neither of the two needs any longer still answer by name: until others
take their place, or no request has come for ten minutes. So at most three models are loaded.

A thread looks at the output twice a second. From the moment at which it has seen a switch,
`current` is the new space or, while its model is loaded, nobody.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from surge_dagster.engine.derived.conversion import cut
from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import CurrentSpace, read_current, space_of_readers
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.waiting import every, in_background, result_of
from surge_dagster.service.errors import SpaceLoading, UnknownSpace
from surge_dagster.service.lane import Lane, LaneCounts
from surge_dagster.service.space_lanes import LaneSettings, SpaceLanes

log = logging.getLogger(__name__)

CURRENT = "current"
State = Literal["current", "next", "draining"]
_LOOK_SECONDS = 0.5
_LISTING_SECONDS = 10.0  # between two listings of a bucket's spaces, each of a request per space
_DRAINED_SECONDS = 600.0  # without a request
_CLOSING_SECONDS = 30.0  # for the answers of lanes that end
_LOADING_SECONDS, _LOAD_AGAIN_SECONDS = 2.0, 60.0
_FAILED = "its workers failed, and the service's log says why"
_ORDER: tuple[State, ...] = ("current", "next", "draining")


@dataclass(frozen=True, slots=True)
class ServedSpace:
    """A space whose lanes are loaded.

    Attributes:
        space: as on record, maybe a derived one.
        queries, documents: encode into the space, or into that which it is derived from.
        state: "next": a switch to it finds its lanes warm; "draining": it was current, and is
            answered by name for now.
        dimensions: that vectors can be cut to, in falling order; the first is the space's own.
    """

    space: Space
    queries: Lane
    documents: Lane
    state: State
    dimensions: tuple[int, ...]

    def converted(self, vectors: np.ndarray, dimensions: int | None = None) -> np.ndarray:
        """Vectors of a lane with the dimensions of the space, or fewer of `dimensions`: float32,
        cut as in files.

        Vectors of the space's own type, such as int8, are compared with these, as `search` does.
        """
        return cut(vectors, replace(self.space, dimension=dimensions or self.space.dimension))


class ServedSpaces:
    """The served spaces of an output. Use `with`, which closes them.

    Args:
        settings: of their lanes.
        named: of a model that must be among those that are loaded.

    Attributes:
        counts: of all lanes that there were, by the name of their space and their side.
    """

    def __init__(self, store: Store, settings: LaneSettings, named: Space | None = None) -> None:
        self._settings = settings
        self.counts: dict[tuple[str, Task], LaneCounts] = {}
        self._store, self._named = store, named
        self._lock = threading.RLock()
        self._following = ExitStack()
        self._pointer: CurrentSpace | None = None
        self._listed_at = 0.0
        self._trouble = ""  # why the output could not be read last
        self._current: Space | None = None
        self._next: Space | None = None
        self._spaces: dict[str, Space] = {}  # by name, in the order in which they were seen first
        self._past: set[str] = set()  # `encoder_sha256` of spaces that were current
        self._lanes: dict[str, SpaceLanes] = {}  # ready, by `encoder_sha256`
        self._unneeded_since: dict[str, float] = {}  # of those that drain
        self._ending: list[tuple[SpaceLanes, Future[None]]] = []
        self._loading: dict[str, tuple[SpaceLanes, Future[None]]] = {}
        self._failed: dict[str, tuple[str, float]] = {}  # why, and when to load again
        self._served: list[ServedSpace] = []
        self._is_closed = False

    def start(self) -> None:
        """Load the current space, wait until its query lane is warm, and follow the output from
        then on.

        Raises:
            ConfigError: the output has no current space, its model cannot be used here, the promise
                cannot be kept, or neither this space nor the next one is of the named model.
            EncoderError: the workers do not start.
        """
        self._look()
        current = self._current
        assert current is not None
        if self._named is not None and self._named.model_digest not in {
            each.model_digest for each in self._wanted()
        }:
            served = " and ".join(
                f"{each.name} of the model {each.requested.model!r}" for each in self._wanted()
            )
            raise ConfigError(
                f"the model {self._named.requested.model!r} (--model) is not that of a space that would be served: "
                f"{self._store.url!r} has {served}. Leave it out, or embed with it first."
            )
        lanes = SpaceLanes(current, self._settings, self.counts)
        try:
            lanes.start()
        except BaseException:
            lanes.close()
            raise
        with self._lock:
            self._lanes[lanes.sha256] = lanes
        self._follow()
        self._following.enter_context(every(_LOOK_SECONDS, self._follow, "surge-served-spaces"))

    def find(self, model: str) -> ServedSpace:
        """The space of this name, else that of the model's name, the current one first; "current"
        is the current one.

        Raises:
            SpaceLoading: its model is not loaded yet.
            UnknownSpace: it is not served.
        """
        with self._lock:
            if model == CURRENT and self._current is not None:
                return self._ready(self._current)
            known = [*self._wanted(), *(served.space for served in self._served)]
            for names in (
                [space.name for space in known],
                [space.requested.model for space in known],
            ):
                if model in names:
                    return self._ready(known[names.index(model)])
            names = [*(space.name for space in known), *(space.requested.model for space in known)]
            raise UnknownSpace(model, list(dict.fromkeys([CURRENT, *names])))

    def served(self) -> list[ServedSpace]:
        """Those with loaded lanes, the current one first."""
        return list(self._served)

    @property
    def is_ready(self) -> bool:
        """Whether the current space is loaded and its query lane has a worker."""
        return any(served.state == CURRENT and served.queries.is_alive for served in self._served)

    @property
    def is_alive(self) -> bool:
        """Whether the query lane of the current space has a worker; one that is being loaded does
        not count."""
        return not self._is_closed and all(
            each.queries.is_alive for each in self._served if each.state == CURRENT
        )

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse requests, wait for the answers of those that were accepted for so long, and end
        all workers."""
        self._following.close()
        with self._lock:
            self._is_closed = True
            changing = [*self._loading.values(), *self._ending]
            closing = [*self._lanes.values(), *(lanes for lanes, _ in changing)]
        ends = [
            in_background(partial(lanes.close, drain_seconds), "surge-close-space")
            for lanes in closing
        ]
        for end in (*ends, *(end for _, end in changing)):
            result_of(end)

    def __enter__(self) -> ServedSpaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self, space: Space) -> ServedSpace:
        for served in self._served:
            if served.space.name == space.name:
                return served
        reason, seconds = "its model is being loaded", _LOADING_SECONDS
        if space.encoder_sha256 in self._failed:
            reason, load_again_at = self._failed[space.encoder_sha256]
            seconds = max(_LOADING_SECONDS, load_again_at - time.monotonic())
        raise SpaceLoading(
            f"the space {space.name} is not ready: {reason}; try again in {seconds:.0f} s", seconds
        )

    def _wanted(self) -> list[Space]:
        """Those whose lanes are to be loaded."""
        return [space for space in (self._current, self._next) if space is not None]

    # Below runs in the following thread, and before it begins.

    def _follow(self) -> None:
        try:
            self._look()
        except (SurgeError, OSError) as error:  # what is served stays so
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("the output cannot be followed: %s", self._trouble)
        with self._lock:
            if self._is_closed:
                return
            self._end_failed()
            wanted = {space.encoder_sha256: space for space in self._wanted()}
            for sha256, space in wanted.items():
                _, load_again_at = self._failed.get(sha256, ("", 0.0))
                if (
                    sha256 not in self._lanes
                    and sha256 not in self._loading
                    and time.monotonic() >= load_again_at
                ):
                    lanes = SpaceLanes(space, self._settings, self.counts)
                    load = in_background(partial(self._load, lanes, space.name), "surge-load-space")
                    self._loading[sha256] = lanes, load
            self._ending = [(lanes, closed) for lanes, closed in self._ending if not closed.done()]
            for lanes in self._drained(set(wanted)):
                closed = in_background(partial(lanes.close, _CLOSING_SECONDS), "surge-close-space")
                self._ending.append((lanes, closed))
            self._publish()

    def _end_failed(self) -> None:
        """Takes out the lanes whose pool has given up: they are loaded again later."""
        for sha256, lanes in list(self._lanes.items()):
            if lanes.queries.failed_at is not None:
                self._failed[sha256] = (_FAILED, lanes.queries.failed_at + _LOAD_AGAIN_SECONDS)
                self._ending.append(
                    (self._lanes.pop(sha256), in_background(lanes.close, "surge-close-space"))
                )
            elif (
                since := lanes.documents.failed_at
            ) is not None and time.monotonic() >= since + _LOAD_AGAIN_SECONDS:
                # Queries go on meanwhile. The new lane has no worker before its first request.
                self._ending.append(
                    (lanes, in_background(lanes.renew_documents().close, "surge-close-lane"))
                )

    def _look(self) -> None:
        """Reads which spaces the output has, and which one is current."""
        pointer, now = read_current(self._store), time.monotonic()
        patience = _LISTING_SECONDS if self._store.is_remote else 0.0
        if (
            self._current is not None
            and pointer == self._pointer
            and now < self._listed_at + patience
        ):
            return
        listed = {space.name: space for space in list_spaces(self._store)}
        current = (listed.get(pointer.space) if pointer else None) or space_of_readers(self._store)
        previous = listed.get(pointer.previous or "") if pointer else None
        with self._lock:
            known = [name for name in self._spaces if name in listed]
            self._spaces = {name: listed[name] for name in dict.fromkeys([*known, *listed])}
            self._past |= {
                space.encoder_sha256 for space in (self._current, previous) if space is not None
            }
            self._past.discard(current.encoder_sha256)
            others = [
                space
                for space in self._spaces.values()
                if space.encoder_sha256 != current.encoder_sha256
            ]
            self._next = next(
                (space for space in reversed(others) if space.encoder_sha256 not in self._past),
                None,
            )
            self._current, self._pointer, self._listed_at, self._trouble = current, pointer, now, ""

    def _load(self, lanes: SpaceLanes, name: str) -> None:
        why = shown = ""
        try:
            lanes.start(keep_promise=False)
        except Exception as error:
            why = str(error) or repr(error)
            # others may tell what a worker printed
            shown = why if isinstance(error, ConfigError) else _FAILED
            lanes.close()
        with self._lock:
            self._loading.pop(lanes.sha256, None)
            if self._is_closed:
                return  # `close` closes these lanes too
            if why:
                log.warning("the space %s cannot be loaded: %s", name, why)
                self._failed[lanes.sha256] = (shown, time.monotonic() + _LOAD_AGAIN_SECONDS)
            else:
                self._failed.pop(lanes.sha256, None)
                self._lanes[lanes.sha256] = lanes
            self._publish()

    def _drained(self, wanted: set[str]) -> list[SpaceLanes]:
        """Takes out the lanes that end now; of those that are not wanted, one may stay: that which
        was wanted last."""
        now = time.monotonic()
        self._unneeded_since = {
            sha256: self._unneeded_since.get(sha256, now)
            for sha256 in self._lanes
            if sha256 not in wanted
        }
        newest = max(
            self._unneeded_since, key=lambda sha256: self._unneeded_since[sha256], default=""
        )
        ended = []
        for sha256, since in list(self._unneeded_since.items()):
            idle_seconds = now - max(since, self._lanes[sha256].last_accepted_at)
            if sha256 != newest or idle_seconds > _DRAINED_SECONDS:
                ended.append(self._lanes.pop(sha256))
                del self._unneeded_since[sha256]
        return ended

    def _publish(self) -> None:
        served = [
            ServedSpace(
                space,
                lanes.queries,
                lanes.documents,
                self._state(space),
                self._dimensions(space, lanes),
            )
            for space in self._spaces.values()
            if (lanes := self._lanes.get(space.encoder_sha256)) is not None
        ]
        self._served = sorted(served, key=lambda each: _ORDER.index(each.state))

    def _state(self, space: Space) -> State:
        if self._current is not None and space.name == self._current.name:
            return "current"
        was_current = self._pointer is not None and space.name == self._pointer.previous
        return "draining" if was_current or space.encoder_sha256 in self._unneeded_since else "next"

    def _dimensions(self, space: Space, lanes: SpaceLanes) -> tuple[int, ...]:
        derived = {
            other.dimension
            for other in self._spaces.values()
            if other.derived
            and other.encoder_sha256 == lanes.sha256
            and other.dtype in ("float32", "float16")
        }
        fewer = {
            size for size in derived | set(lanes.matryoshka_dimensions) if size < space.dimension
        }
        return (space.dimension, *sorted(fewer, reverse=True))
