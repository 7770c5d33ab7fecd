"""ServedSpaces: the spaces of an output that the service answers for, which follow its switches.

Two spaces are served: the current one, and the next one, which is the newest space that was current
neither before the last switch nor since the service began. So a switch finds its lanes warm. Spaces
that are there at the start count as begun in the order of their names: an output does not say when.

A thread looks at the output twice a second, and at a bucket every five seconds. From the moment at
which it has seen a switch, `current` is the new space. Until its model is loaded, requests for it
are answered with 503.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from surge_dagster.engine.derived.conversion import cut
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import read_current, space_of_readers
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.waiting import every
from surge_dagster.service.errors import Refusal
from surge_dagster.service.lane import Lane
from surge_dagster.service.space_lanes import LaneSettings, SpaceLanes, start_lanes

log = logging.getLogger(__name__)

CURRENT = "current"
_LOOK_SECONDS = 0.5
_REMOTE_LOOK_SECONDS = 5.0  # each look is a request per space
_CLOSING_SECONDS = 30.0  # for the answers of lanes that end
_LOADING_SECONDS = 2.0
_LOAD_AGAIN_SECONDS = 60.0


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
    """

    def __init__(self, store: Store, settings: LaneSettings) -> None:
        self.store = store
        self.settings = settings
        self._following = ExitStack()
        self._listed: dict[str, Space] = {}  # by name, in the order in which they were seen first
        self._were_current = set[str]()  # their `encoder_sha256`
        self._wanted: list[Space] = []  # the current space first
        self._lanes: dict[str, SpaceLanes] = {}  # ready, by `encoder_sha256`
        self._load_again_at: dict[str, float] = {}  # of those that failed
        self._served: list[ServedSpace] = []
        self._trouble = ""  # why the output could not be read last
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
        """Return the space of this name, else that of the model's name, the current one first.

        Raises:
            Refusal: it is not served, or its model is not loaded yet.
        """
        wanted = self._wanted
        names = [CURRENT]
        names += [space.name for space in wanted]
        names += [space.requested.model for space in wanted]
        if model not in names:
            message = f"The model {model!r:.100} is not served. Use {', '.join(names)}."
            raise Refusal(404, "model_not_found", message, "model")
        return self._ready([wanted[0], *wanted, *wanted][names.index(model)])

    def served(self) -> list[ServedSpace]:
        """Return the spaces with loaded lanes, the current one first."""
        return self._served

    @property
    def is_ready(self) -> bool:
        """Whether the current space is loaded and its query lane has a worker."""
        return any(each.state == CURRENT and each.queries.is_alive for each in self._served)

    @property
    def is_alive(self) -> bool:
        """Whether the query lane of the current space has a worker; one that is being loaded does
        not count."""
        is_loading = not any(each.state == CURRENT for each in self._served)
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
        for served in self._served:
            if served.space.name == space.name:
                return served
        reason = "its model is being loaded"
        seconds = _LOADING_SECONDS
        if space.encoder_sha256 in self._load_again_at:
            reason = "its model could not be loaded, and the service's log says why"
            load_again_at = self._load_again_at[space.encoder_sha256]
            seconds = max(seconds, load_again_at - time.monotonic())
        message = f"The space {space.name} is not ready: {reason}. Try again in {seconds:.0f} s."
        raise Refusal(503, "space_loading", message, "model", seconds)

    # Below runs in the following thread, and before it begins.

    def _follow(self) -> None:
        try:
            self._look()
        except (SurgeError, OSError) as error:  # what is served stays so
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("the output cannot be followed: %s", self._trouble)
            return
        self._trouble = ""
        self._close_unwanted()
        for space in self._wanted:
            load_again_at = self._load_again_at.get(space.encoder_sha256, 0.0)
            if space.encoder_sha256 not in self._lanes and time.monotonic() >= load_again_at:
                self._try_to_load(space)

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

    def _try_to_load(self, space: Space) -> None:
        try:
            self._load(space)
        except Exception as error:
            log.warning("the space %s cannot be loaded: %s", space.name, str(error))
            self._load_again_at[space.encoder_sha256] = time.monotonic() + _LOAD_AGAIN_SECONDS

    def _load(self, space: Space) -> None:
        lanes = start_lanes(space, self.settings)
        self._lanes[space.encoder_sha256] = lanes
        self._load_again_at.pop(space.encoder_sha256, None)
        if self._is_closed:
            lanes.close()
        self._publish()

    def _close_unwanted(self) -> None:
        wanted = {space.encoder_sha256 for space in self._wanted}
        unwanted = [sha256 for sha256 in self._lanes if sha256 not in wanted]
        for sha256 in unwanted:
            self._lanes.pop(sha256).close(_CLOSING_SECONDS)

    def _publish(self) -> None:
        served = list[ServedSpace]()
        for space in self._wanted:
            lanes = self._lanes.get(space.encoder_sha256)
            if lanes is not None:
                state = "current" if space is self._wanted[0] else "next"
                dimensions = self._dimensions(space)
                served.append(ServedSpace(space, lanes.queries, lanes.documents, state, dimensions))
        self._served = served

    def _dimensions(self, space: Space) -> tuple[int, ...]:
        """Return those of the space, and of spaces that were cut from the same vectors."""
        found = {space.dimension}
        for other in self._listed.values():
            is_cut = other.dtype in ("float32", "float16") and other.dimension < space.dimension
            if is_cut and other.encoder_sha256 == space.encoder_sha256:
                found.add(other.dimension)
        return tuple(sorted(found, reverse=True))
