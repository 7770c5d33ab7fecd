"""RemotePool: an encoder pool that encodes through the encoder service of the machine, where there is one for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker_process import WorkerSeat
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.remote.connection import Connection, Lost, Refused, requirements, socket_folder
from surge_dagster.engine.remote.workers import RemoteWorkers

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 60.0


class RemotePool(EncoderPool):
    """Encodes through the workers of a service, where one makes the same vectors, else through workers of its own.

    Args:
        service: "auto": any service of this user on this machine; "off": none; or the path of the socket of the only
            one that is right.
        patience_seconds: how long a service that is lost is waited for, before workers of this process take over.
        settings: see `EncoderPool`.
    """

    def __init__(
        self,
        spec: EncodingSpec | Space = EncodingSpec(),  # noqa: B008 (frozen)
        *,
        service: str = "auto",
        patience_seconds: float = _PATIENCE_SECONDS,
        **settings: Any,
    ) -> None:
        super().__init__(spec, **settings)
        self._service, self._patience_seconds = service, patience_seconds

    def _dispatcher_of(self, seats: list[WorkerSeat]) -> Dispatcher:
        start_own = partial(super()._dispatcher_of, seats)
        if self._service == "off":
            return start_own()
        connect = partial(self._connect, requirements(self.space, seats[0]))
        try:
            connection = connect(lambda: self._closed)
        except (Refused, Lost) as error:
            if self._service != "auto":
                raise ConfigError(f"{error}. Start it, or set service to auto or off") from None
            level = logging.WARNING if isinstance(error, Refused) else logging.INFO
            log.log(level, "%s; the run starts workers of its own", error)
            return start_own()
        workers = connection.ready["workers"]
        devices = [worker["device"] for worker in workers]
        self.device, self.all_devices = ",".join(dict.fromkeys(devices)), ",".join(devices)
        self.hardware, self.workers = connection.ready["hardware"], len(workers)
        # It has what a pool asks of a dispatcher, which has no other class above it.
        return cast(Dispatcher, RemoteWorkers(connection, connect, start_own, self._patience_seconds))

    def _connect(self, required: protocol.Message, is_over: Callable[[], bool]) -> Connection:
        """To the first service that encodes for this pool; of the others' reasons a refusal says the most."""
        found = sorted(socket_folder().glob("*.sock")) if self._service == "auto" else [Path(self._service)]
        reasons: list[Refused | Lost] = []
        for path in found:
            try:
                return Connection(path.expanduser(), required, is_over)
            except (Refused, Lost) as error:
                reasons.append(error)
        nobody = Lost("no encoder service runs on this machine")
        raise min(reasons, key=lambda reason: isinstance(reason, Lost), default=nobody)
