"""Connections to a store for the client that writes: through which proxy, and how long each step may take."""

from __future__ import annotations

from typing import Any

import urllib3
from requests.utils import get_auth_from_url, get_environ_proxies, prepend_scheme_if_needed, select_proxy
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from surge_dagster.engine.errors import ConfigError

_CONNECTIONS = 64


def open_pool(url: str, *, timeout_seconds: float, connect_timeout_seconds: float) -> urllib3.PoolManager:
    """Connections that are used again; nothing is tried again.

    Args:
        url: of the service; `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` say how it is reached.
        timeout_seconds: how long sending a body may take, and how long the answer may.
        connect_timeout_seconds: how long connecting may take.

    Raises:
        ConfigError: the proxy is none that can be used.
    """
    options: dict[str, Any] = {
        "num_pools": 2,
        "maxsize": _CONNECTIONS,
        "timeout": urllib3.Timeout(connect=connect_timeout_seconds, read=timeout_seconds),
        "retries": False,
    }
    proxy = select_proxy(url, get_environ_proxies(url))
    if proxy:
        proxy = prepend_scheme_if_needed(proxy, "http")
        user = ":".join(get_auth_from_url(proxy))
        headers = urllib3.make_headers(proxy_basic_auth=user if user != ":" else None)
        try:
            pool = urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
        except urllib3.exceptions.ProxySchemeUnknown:
            raise ConfigError(
                "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names a proxy that is neither http:// nor https://; uploads "
                "cannot go through it. Name one that is, or list the store's host in NO_PROXY."
            ) from None
    else:
        pool = urllib3.PoolManager(**options)
    pool.pool_classes_by_scheme = _pools(timeout_seconds)
    return pool


def _pools(timeout_seconds: float) -> dict[str, type[HTTPConnectionPool]]:
    class Sending:
        def request(self: Any, *args: Any, **kwargs: Any) -> None:
            if self.is_closed:
                self.connect()
            self.timeout = timeout_seconds  # it would stay what connecting may take until the body is sent
            super().request(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    class Connection(Sending, HTTPConnection):
        pass

    class SecureConnection(Sending, HTTPSConnection):
        pass

    class Pool(HTTPConnectionPool):
        ConnectionCls = Connection  # pyright: ignore[reportAssignmentType]

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = SecureConnection  # pyright: ignore[reportAssignmentType]

    return {"http": Pool, "https": SecurePool}
