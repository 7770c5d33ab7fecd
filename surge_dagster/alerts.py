"""Telling somebody: alerts of failed runs and of slow SuperBatches, and the hooks that carry them out of Dagster.

A hook is any callable that takes an `Alert`. Hooks are called by sensors, never by a run: whatever they do, a run is
neither held up nor failed by it. A hook that raises or hangs is named in the tick's log, and the others go on.

Dagster gives a tick a minute, and what takes longer is done again from the start, with every alert that was told
already. So no hook is waited for for long, and one that hangs is told nothing more until it returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

import urllib3

from surge_dagster.engine.errors import SurgeError

Kind = Literal["run_failed", "slow_superbatch"]

# A tick of the sensor that tells of failed runs takes up to five of them.
PATIENCE_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that a person should know.

    Attributes:
        catalog: its name; empty for the catalog without one.
        kind: what happened.
        run_id: Dagster's id of the run.
        message: what happened, in sentences; at most some thousand characters.
        failed_partitions: catalog keys of what the run refused, the first of them.
        failed_count: how many there are in all.
        link: where Dagster's UI shows the run; None where the settings do not say where that is.
    """

    catalog: str
    kind: Kind
    run_id: str
    message: str
    failed_partitions: tuple[str, ...] = ()
    failed_count: int = 0
    link: str | None = None

    @property
    def text(self) -> str:
        """All of it as a message for a person."""
        lines = [f"{self.catalog}: {self.message}" if self.catalog else self.message]
        if self.failed_partitions:
            more = self.failed_count - len(self.failed_partitions)
            named = ", ".join(self.failed_partitions) + (f" and {more:,} more" if more > 0 else "")
            lines.append(f"Failed partitions: {named}")
        lines.append(self.link or f"Run {self.run_id}")
        return "\n".join(lines)


class AlertHook(Protocol):
    """What takes an alert to somebody; what it raises is logged."""

    def __call__(self, alert: Alert, /) -> object: ...


class NotDelivered(SurgeError):
    """A hook could not get rid of an alert; the text never holds an address, which may be a secret."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Posts an alert as JSON: its fields by name, and `text`, which is all of them as a message.

    Attributes:
        url: who knows it can post there, so it is shown nowhere.
        timeout_seconds: from the start until the answer begins.
    """

    url: str = field(repr=False)
    timeout_seconds: float = 5.0

    def __call__(self, alert: Alert, /) -> None:
        """Post it once; redirections are not followed.

        Raises:
            NotDelivered: nobody answers, or the answer is not one of success.
        """
        try:
            answer = urllib3.request(
                "POST",
                self.url,
                json={**asdict(alert), "text": alert.text},
                timeout=urllib3.Timeout(total=self.timeout_seconds),
                retries=False,
                redirect=False,
                preload_content=False,
            )
            answer.release_conn()
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            # Without its cause and its text, which name the address.
            raise NotDelivered(f"the webhook cannot be reached ({type(error).__name__})") from None
        if not 200 <= answer.status < 300:
            raise NotDelivered(f"the webhook answered {answer.status}")


class Deliveries:
    """Takes alerts to hooks, for as long as the process lives.

    Args:
        hooks: each is told of every alert, unless it still hangs at an earlier one.
    """

    def __init__(self, hooks: Sequence[AlertHook]) -> None:
        self._hooks = tuple(hooks)
        self._hung: dict[int, threading.Thread] = {}  # by the hook's place

    def deliver(self, alert: Alert, log: logging.Logger, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Call the hooks, all at once; returns when they are done or the patience is over, and never raises.

        Args:
            log: is told of hooks that failed, did not return, or were passed over.
            patience_seconds: for all hooks together; one that takes longer is left alone.
        """
        deadline = time.monotonic() + patience_seconds
        hung = {place for place, call in self._hung.items() if call.is_alive()}
        calls = {place: self._begin(place, alert, log) for place in range(len(self._hooks)) if place not in hung}
        for place in hung:
            self._hung[place].join(max(0.0, deadline - time.monotonic()))
            if self._hung[place].is_alive():
                log.warning(
                    f"the alert hook {_name_of(self._hooks[place])} has not returned from an earlier alert; it is not "
                    f"told of run {alert.run_id}"
                )
            else:
                calls[place] = self._begin(place, alert, log)
        for place, call in calls.items():
            call.join(max(0.0, deadline - time.monotonic()))
            if call.is_alive():
                self._hung[place] = call
                log.warning(
                    f"the alert hook {_name_of(self._hooks[place])} has not returned after {patience_seconds:.3g} s; "
                    "left alone"
                )

    def _begin(self, place: int, alert: Alert, log: logging.Logger) -> threading.Thread:
        call = threading.Thread(target=_call, args=(self._hooks[place], alert, log), name="surge-alert", daemon=True)
        call.start()
        return call


def _call(hook: AlertHook, alert: Alert, log: logging.Logger) -> None:
    try:
        hook(alert)
    except Exception as error:
        log.warning(f"the alert hook {_name_of(hook)} failed on run {alert.run_id}: {type(error).__name__}: {error}")


def _name_of(hook: AlertHook) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)
