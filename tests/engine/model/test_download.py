"""A model comes from the hub whole or not at all, and who waits for it can leave at any time."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model import download
from surge_dagster.engine.model.model_files import find_model
from tests.signals import interrupted_in_another_thread

pytestmark = pytest.mark.timeout(60)
_REVISION = "5" * 40
_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
_FILES = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", _SHARDS, strict=True))}).encode(),
    _SHARDS[0]: b"a" * 1_000,
    _SHARDS[1]: b"b" * 100_000,
    "tokenizer.json": b'{"model": {}}',
    "pytorch_model.bin": b"not asked for",
}


@dataclass
class Hub:
    """A model hub with one model, `team/model`; it stops in the middle of a file for as long as it is told to."""

    stops_in: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    asked_for: list[str] = field(default_factory=list)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    kept = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(self.path.partition(f"/team/model/resolve/{_REVISION}/")[2])

        def do_GET(self) -> None:
            if self.path.startswith("/api/models/team/model/tree/"):
                self._send(200, json.dumps([_entry(path) for path in _FILES]).encode())
            elif self.path.startswith("/api/models/team/model"):
                self._send(200, json.dumps({"id": "team/model", "sha": _REVISION}).encode())
            else:
                self.do_HEAD()

        def _answer(self, path: str) -> None:
            if path not in _FILES:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Request-Id": "7"})
            headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": _REVISION}
            return self._send(200, _FILES[path], headers, path)

        def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None, path: str = "") -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if path:
                kept.asked_for.append(path)
            if path and path == kept.stops_in:
                self.wfile.write(content[: len(content) // 2])
                kept.stopped.set()
                kept.goes_on.wait()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    # The hub's client as nobody has set it up: neither whoever runs the tests nor a test that loaded a model before.
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_", "TQDM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield kept
        kept.goes_on.set()
        server.shutdown()
        thread.join()


def _entry(path: str) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(_FILES[path]), "oid": _etag(path)}


def _etag(path: str) -> str:
    return hashlib.sha1(_FILES[path]).hexdigest()


def _model(folder: Path) -> dict[str, bytes]:
    """The files of the model that are whole in the hub client's cache."""
    return {path.name: path.read_bytes() for path in folder.glob(f"hub/*/snapshots/{_REVISION}/*")}


@pytest.mark.parametrize(("stops_in", "comes_before"), [("tokenizer.json", "config.json"), (_SHARDS[1], _SHARDS[0])])
def test_an_interrupted_download_leaves_no_process_and_the_next_one_asks_for_the_rest(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str], stops_in: str, comes_before: str
) -> None:
    processes = psutil.Process().children()
    hub.stops_in = stops_in
    with interrupted_in_another_thread(after=lambda: hub.stopped.is_set() and comes_before in _model(tmp_path)):
        find_model("team/model")
    assert set(psutil.Process().children()) <= set(processes)
    assert not list(tmp_path.rglob("*.incomplete"))
    kept = _model(tmp_path)
    assert stops_in not in kept
    assert stops_in in _SHARDS or not kept.keys() & set(_SHARDS)

    hub.stops_in = ""
    hub.asked_for.clear()
    folder = find_model("team/model")
    assert folder.name == _REVISION
    assert _model(tmp_path) == {path: content for path, content in _FILES.items() if path != "pytorch_model.bin"}
    assert set(hub.asked_for) == _model(tmp_path).keys() - kept.keys()
    assert "Fetching" in capfd.readouterr().err


def test_a_model_that_is_here_is_not_looked_for_elsewhere(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_model("team/model")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(download.subprocess, "Popen", None)
    assert find_model("team/model") == folder


def test_a_download_ends_with_the_process_that_asked_for_it(hub: Hub, tmp_path: Path) -> None:
    hub.stops_in = _SHARDS[1]
    code = "from surge_dagster.engine.model.model_files import find_model; find_model('team/model')"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        hub.stopped.wait()
        downloads = psutil.Process(parent.pid).children()
        parent.kill()
    assert len(downloads) == 1
    assert not psutil.wait_procs(downloads, timeout=30)[1]
    assert not list(tmp_path.rglob("*.incomplete"))


def test_what_the_hub_refuses_is_told_in_its_words(hub: Hub) -> None:
    told = rf"model 'team/no' could not be downloaded from {os.environ['HF_ENDPOINT']} \((?s:.*)Repository Not Found"
    with pytest.raises(ConfigError, match=told + r"(?s:.*)\); check the name"):
        find_model("team/no")


def test_a_download_that_is_killed_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["sh", "-c", "kill -KILL $$"]
    monkeypatch.setattr(download, "module_command", lambda *_: command)
    with pytest.raises(ConfigError, match=r"\(its process ended with SIGKILL"):
        find_model("team/model")
