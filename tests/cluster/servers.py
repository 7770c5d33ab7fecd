"""Servers that are hosts of their own: a bucket, and the database of a Dagster instance."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml

from tests.cluster.hosts import ROOT, Host
from tests.dagster.postgres_server import NoPostgres, postgres_programs
from tests.engine.store.object_server import BUCKET

_PORT = 9000
_USER, _DATA = "postgres", "/tmp/data"  # the server refuses to run as root


@dataclass(frozen=True)
class Bucket:
    """An empty bucket on a host."""

    host: Host
    url = f"s3://{BUCKET}/out"

    @property
    def endpoint(self) -> str:
        return f"http://{self.host.address}:{_PORT}"

    @property
    def env(self) -> dict[str, str]:
        """Of a process that uses it."""
        options = {
            "endpoint": self.endpoint,
            "access_key_id": "anybody",
            "secret_access_key": "anything",
        }
        return {"SURGE_STORAGE_OPTIONS": json.dumps(options)}

    def objects(self) -> dict[str, str]:
        """Etag by key."""
        code = (
            "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
        )
        listing = self.host.run(sys.executable, "-c", code, f"{self.endpoint}/{BUCKET}")
        return dict(re.findall(r"<Key>([^<]*)</Key>.*?<ETag>([^<]*)</ETag>", listing))

    def start(self) -> None:
        command = (sys.executable, "-m", "tests.engine.store.object_server")
        server = self.host.popen(
            *(*command, self.host.address, _PORT),
            env={"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == f"{self.endpoint}\n"


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for a database's socket, which all users reach."""
    folder = Path(tempfile.mkdtemp(prefix="surge-postgres-"))
    yield folder
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Database:
    """Postgres on a host.

    Args:
        socket: a folder that is shared, where the test, which is not in the network, reaches it.
    """

    host: Host
    socket: Path

    @property
    def url(self) -> str:
        """For hosts, with what the deployed instances give."""
        deployed = yaml.safe_load((ROOT / "deploy" / "docker" / "dagster.yaml").read_text())[
            "storage"
        ]["postgres"]
        params = deployed["postgres_db"]["params"]
        return f"postgresql+psycopg2://{_USER}@{self.host.address}/{_USER}?{urlencode(params)}"

    @property
    def url_of_test(self) -> str:
        return f"postgresql+psycopg2://{_USER}@/{_USER}?host={self.socket}"

    def start(self) -> None:
        """Make it, empty, and start it."""
        try:
            postgres_programs()
        except NoPostgres as reason:
            pytest.skip(str(reason))
        owner = pwd.getpwnam(_USER)
        os.chown(self.socket, owner.pw_uid, owner.pw_gid)
        self.host.run("install", "-d", "-m", "700", "-o", _USER, "-g", _USER, _DATA)
        self._do("initdb", "-U", _USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self.host.run("sh", "-c", f"echo 'host all all 10.77.0.0/24 trust' >> {_DATA}/pg_hba.conf")
        self._begin()

    def restart(self) -> None:
        """End it as a crash does, and start it again."""
        self._do("pg_ctl", "stop", "-m", "immediate")
        self._begin()

    def home(self, folder: Path, *, of_test: bool = False) -> Path:
        """A DAGSTER_HOME with this database, of hosts or of the test."""
        settings = yaml.safe_load((ROOT / ".dagster" / "dagster.yaml").read_text())
        del settings["event_log_storage"]
        settings["storage"] = {
            "postgres": {"postgres_url": self.url_of_test if of_test else self.url}
        }
        folder.mkdir()
        (folder / "dagster.yaml").write_text(yaml.safe_dump(settings))
        return folder

    def _begin(self) -> None:
        options = (
            f"-c listen_addresses={self.host.address} -c unix_socket_directories={self.socket}"
        )
        self._do("pg_ctl", "start", "-w", "-l", f"{_DATA}/log", "-o", options)

    def _do(self, program: str, *words: str) -> None:
        user = ("setpriv", "--reuid", _USER, "--regid", _USER, "--clear-groups")
        self.host.run(*user, postgres_programs() / program, "-D", _DATA, *words)
