"""nginx before two services, with the configuration of deploy/."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.service_process import free_port
from tests.waiting import until

_CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "nginx.conf"
_PLACES = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@contextmanager
def documented_proxy(addresses: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield the URL of nginx before the services with these addresses.

    It has the documented configuration, but without TLS.
    """
    program = shutil.which("nginx", path=_PLACES)
    if program is None:
        pytest.skip("not installed: the Debian package nginx-light (apt-get install nginx-light)")

    site = re.sub(r" *ssl_certificate.*\n", "", _CONFIG.read_text())
    listen = f"127.0.0.1:{free_port()}"
    changes = {f"10.0.0.{number}:8080": each for number, each in enumerate(addresses, 1)}
    changes["listen 443 ssl;"] = f"listen {listen};"
    for old, new in changes.items():
        assert site.count(old) == 1
        site = site.replace(old, new)

    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in _TEMPORARY)
    process_settings = f"daemon off;\nuser root;\npid {folder}/pid;\nevents {{}}\n"
    config = folder / "nginx.conf"
    config.write_text(f"{process_settings}http {{\naccess_log off;\n{temporary}{site}}}\n")
    log = folder / "error.log"
    host, _, port = listen.partition(":")
    with subprocess.Popen([program, "-c", str(config), "-e", str(log)]) as process:
        try:
            until(lambda: process.poll() is not None or _is_open(host, int(port)))
            assert process.poll() is None, log.read_text()
            yield f"http://{listen}"
        finally:
            process.terminate()


def _is_open(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0
