"""A bucket on a host of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass

from tests.cluster.hosts import ROOT, Host
from tests.engine.store.object_server import BUCKET

_PORT = 9000


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
