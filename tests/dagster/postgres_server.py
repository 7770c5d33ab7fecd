"""A temporary Postgres server on a free port of 127.0.0.1, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg2.extensions

_USER = "postgres"
_START_SECONDS = 60


class NoPostgres(Exception):
    """Postgres or its driver is missing; the message says what to install."""


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server that accepts connections as `postgres` without a password."""

    port: int
    version: str

    def url(self, database: str = "postgres") -> str:
        """URL of a database. It names the driver, because SQLAlchemy's default is another one."""
        return f"postgresql+psycopg2://{_USER}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str, like: str = "template1") -> str:
        """Create a database as a copy of one that nobody uses any more; gives its URL."""
        with contextlib.closing(_connect(self.port)) as connection:
            connection.autocommit = True
            # Postgres does not copy a database to which somebody is connected, and a closed pool
            # may still be.
            ended = (
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = %s"
            )
            connection.cursor().execute(ended, [like])
            connection.cursor().execute(f'CREATE DATABASE "{name}" TEMPLATE "{like}"')
        return self.url(name)


def postgres_programs() -> Path:
    """The folder of the newest Postgres that Debian's packages have installed, or `NoPostgres`."""
    folders = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[4])
    )
    if not folders:
        raise NoPostgres(
            "not installed: the Debian package postgresql (apt-get install postgresql)"
        )
    return folders[-1].parent


@contextlib.contextmanager
def postgres_server(*, durable: bool = True) -> Iterator[PostgresServer]:
    """Start a server and stop it at the end.

    Args:
        durable: wait for the disk at each commit, as production servers do.

    Raises:
        NoPostgres: Postgres or its driver is missing.
        RuntimeError: the server does not start; the message has its log.
    """
    programs = postgres_programs()
    if find_spec("psycopg2") is None or find_spec("dagster_postgres") is None:
        raise NoPostgres(
            "not installed: the extra 'postgres' (make venv EXTRAS=cpu,demo,dev,postgres)"
        )
    folder = Path(tempfile.mkdtemp(prefix="surge-postgres-"))
    account = _account_that_owns(folder)
    try:
        data = folder / "data"
        log = folder / "log"
        made = f"{programs}/initdb -D {data} -U {_USER} -A trust -E UTF8 --locale=C --no-sync"
        subprocess.run(made.split(), cwd=folder, check=True, capture_output=True, **account)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        fsync = "on" if durable else "off"
        command = f"{programs}/postgres -D {data} -p {port} -c listen_addresses=127.0.0.1"
        command += f" -c unix_socket_directories= -c fsync={fsync}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command.split(), cwd=folder, stdout=output, stderr=output, **account
            )
        try:
            yield PostgresServer(port, _wait_for(process, port, log))
        finally:
            process.send_signal(signal.SIGINT)  # does not wait for clients
            process.wait(_START_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _account_that_owns(folder: Path) -> dict[str, Any]:
    """Return the account of the server's processes.

    Postgres refuses to run as root; Debian's package has created a user for it.
    """
    if os.geteuid() != 0:
        return {}
    owner = pwd.getpwnam(_USER)
    os.chown(folder, owner.pw_uid, owner.pw_gid)
    return {"user": _USER, "group": _USER, "extra_groups": []}


def _connect(port: int) -> psycopg2.extensions.connection:
    import psycopg2  # in the extra 'postgres'

    return psycopg2.connect(host="127.0.0.1", port=port, user=_USER, dbname="postgres")


def _wait_for(process: subprocess.Popen[Any], port: int, log: Path) -> str:
    import psycopg2

    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with contextlib.closing(_connect(port)) as connection:
                return str(connection.info.server_version // 10_000)
        except psycopg2.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Postgres does not start:\n{log.read_text()}") from error
            time.sleep(0.05)
