"""What a connection may cost: how much is read at a time, how long a client may take, and how much it may send."""

from __future__ import annotations

import os
import select
import selectors
import sys
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from surge_dagster.service.settings import ServiceSettings

CLIENTS_PER_TURN = 8  # each of which may take two milliseconds on a busy machine
_PIPELINED = 64  # requests of a connection that wait for the answers before theirs


class ReadsInTurns(selectors.EpollSelector):
    """Lets an event loop read from few clients before it goes on with what is ready, such as answers.

    Else it reads from all that have sent something: under overload each step of an answer would wait for hundreds of
    refusals. The kernel names those first that have waited longest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll.fromfd(os.dup(self.fileno()))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = list[tuple[selectors.SelectorKey, int]]()
        for descriptor, events in self._epoll.poll(timeout, CLIENTS_PER_TURN):
            can_read = selectors.EVENT_READ if events & ~select.EPOLLOUT else 0
            can_write = selectors.EVENT_WRITE if events & ~select.EPOLLIN else 0
            if (key := self.get_map().get(descriptor)) is not None:
                ready.append((key, (can_read | can_write) & key.events))
        return ready


def bounded_protocol(settings: ServiceSettings) -> type[HttpToolsProtocol]:
    """uvicorn's connections, within the bounds of the settings."""

    class Bounded(HttpToolsProtocol):
        """Ends a connection that begins no request, reads nothing of its answer, or sends much beside its body.

        uvicorn bounds the time between two requests alone, and forgets it when one byte of the next one arrives.
        """

        _overhead = 0  # bytes of the request beside those of its body, less an eighth of these

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look(None)

        def _look(self, before: tuple[Any, int] | None) -> None:
            state = self.cycle, self.transport.get_write_buffer_size()
            is_between = self.timeout_keep_alive_task is not None  # two requests: uvicorn ends it
            is_asking = not is_between and (self.cycle is None or self.cycle.response_complete)
            is_waiting = is_asking or state[1] > 0
            if is_waiting and state == before:
                self.transport.abort()
            else:
                self._next_look = self.loop.call_later(settings.header_seconds, self._look, state)

        def data_received(self, data: bytes) -> None:
            if self.timeout_keep_alive_task is not None:  # the time for the headers begins
                self._next_look.cancel()
                self._look(None)
            while data:
                self._overhead += len(data)
                self._received, self._again = data, b""
                super().data_received(data)
                data = self._again
            if self._overhead > settings.max_header_bytes:
                self.send_400_response("")

        def send_400_response(self, msg: str) -> None:
            if not self.transport.is_closing():
                most = f"{settings.max_header_bytes:,} bytes and an eighth of its body"
                too_many = f"{_PIPELINED} of this connection wait before it"
                super().send_400_response(
                    f"No HTTP request, its headers and chunk sizes have more than {most}, or {too_many}."
                )

        def _should_upgrade(self) -> bool:
            return any(name == b"upgrade" for name, _ in self.headers)

        def handle_websocket_upgrade(self) -> None:
            """Has the request parsed again, as one that asks for no other protocol: else it would lose its body."""
            upgrade, version = sys.exception(), self.scope["http_version"].encode()
            head = [b"%b %b HTTP/%b" % (self.scope["method"].encode(), self.url, version)]
            head += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
            assert upgrade is not None
            self._again = b"\r\n".join(head) + b"\r\n\r\n" + self._received[upgrade.args[0] :]

        def on_header(self, name: bytes, value: bytes) -> None:
            if "method" not in self.scope:  # else it is a trailer, which nobody reads
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            # Also where they came with the end of another request.
            if size > settings.max_header_bytes or len(self.pipeline) >= _PIPELINED:
                raise ValueError  # which is answered with 400
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._overhead -= len(body) + len(body) // 8
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._overhead = 0
            self.scope.setdefault("state", {})["received_at"] = time.monotonic()
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._next_look.cancel()
            super().connection_lost(exc)

    return Bounded
