"""Settings of the HTTP side: where the service listens, and what a client may send."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Where the service listens, and its limits.

    Attributes:
        port: 0 takes a free one.
        uds: path of a Unix socket, which is bound in place of `host` and `port`.
        api_keys: file of digests, see `keys.py`; without one only this machine is served.
        batches: folder for files and batches; without one there are none.
        max_connections: at a time; below the 1,024 descriptors that Linux gives a process by
            default.
        idle_seconds: between two requests of a connection; more than the 60 s of nginx.
        drain_seconds: time after SIGTERM for the answers to requests that were accepted.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    uds: Path | None = None
    api_keys: Path | None = None
    batches: Path | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    max_header_bytes: int = 16 * 1024
    max_connections: int = 900
    idle_seconds: int = 75
    drain_seconds: int = 25
