"""Models are located on this machine or downloaded from the hub, with the files that are needed and
no others."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.locating import find_model
from tests.http_server import QuietHandler, serving

pytestmark = pytest.mark.timeout(60)
_REVISION = "5" * 40
_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
_FILES = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": dict(zip("ab", _SHARDS, strict=True))}
    ).encode(),
    _SHARDS[0]: b"a" * 1_000,
    _SHARDS[1]: b"b" * 100_000,
    "tokenizer.json": b'{"model": {}}',
    "pytorch_model.bin": b"not needed",
    "modeling_custom.py": b"never downloaded",
    "1_Custom/config.json": b'{"width": 8}',
    "1_Custom/modeling_custom.py": b"never downloaded either",
    "onnx/model.onnx": b"not needed",
}
_NOT_NEEDED = (
    "pytorch_model.bin",
    "modeling_custom.py",
    "1_Custom/modeling_custom.py",
    "onnx/model.onnx",
)


@dataclass
class Hub:
    """A model hub with one model, `team/model`; it stops inside the file `stops_in` until `goes_on`
    is set."""

    stops_in: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    requested: list[str] = field(default_factory=list)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    # The hub's client with default settings, whatever the environment or an earlier test has set.
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_", "TQDM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    # the package has a class of the same name
    progress = import_module("huggingface_hub.utils.tqdm")
    monkeypatch.setattr(progress, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr(progress, "progress_bar_states", {})
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    kept = Hub()
    with serving(_handler(kept)) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield kept
        kept.goes_on.set()


def _handler(hub: Hub) -> type[QuietHandler]:
    class Handler(QuietHandler):
        def do_HEAD(self) -> None:
            path = self._path()
            if path not in _FILES:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Request-Id": "7"})
            else:
                headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": _REVISION}
                self.send(200, _FILES[path], headers)

        def do_GET(self) -> None:
            if self.path.startswith("/api/models/team/model/tree/"):
                self.send(200, json.dumps([_entry(path) for path in _FILES]).encode(), {})
            elif self.path.startswith("/api/models/team/model"):
                self.send(200, json.dumps({"id": "team/model", "sha": _REVISION}).encode(), {})
            else:
                self.do_HEAD()

        def write(self, content: bytes) -> None:
            path = self._path()
            if path in _FILES:
                hub.requested.append(path)
            if path and path == hub.stops_in:
                super().write(content[: len(content) // 2])
                hub.stopped.set()
                hub.goes_on.wait()
            super().write(content)

        def _path(self) -> str:
            return self.path.partition(f"/team/model/resolve/{_REVISION}/")[2]

    return Handler


def _entry(path: str) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(_FILES[path]), "oid": _etag(path)}


def _etag(path: str) -> str:
    return hashlib.sha1(_FILES[path]).hexdigest()


def _model(folder: Path) -> dict[str, bytes]:
    """The complete files of the model in the hub client's cache."""
    snapshot = folder / "hub" / "models--team--model" / "snapshots" / _REVISION
    return {
        str(path.relative_to(snapshot)): path.read_bytes()
        for path in snapshot.rglob("*")
        if path.is_file()
    }


def test_download_takes_no_file_that_is_not_needed_and_shows_progress(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = find_model("team/model")
    assert folder.name == _REVISION
    expected = {path: content for path, content in _FILES.items() if path not in _NOT_NEEDED}
    assert _model(tmp_path) == expected
    assert set(hub.requested) == expected.keys()
    assert hub.requested[-1] in _SHARDS, "weights come last"
    assert "Fetching" in capfd.readouterr().err


def test_interrupted_download_is_not_used_and_the_next_one_requests_the_rest(
    hub: Hub, tmp_path: Path
) -> None:
    code = "from surge_dagster.engine.model.locating import find_model; find_model('team/model')"
    hub.stops_in = _SHARDS[1]
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        hub.stopped.wait()
        process.kill()
    kept = _model(tmp_path)
    assert _SHARDS[1] not in kept
    hub.stops_in = ""
    hub.requested.clear()
    assert find_model("team/model").name == _REVISION
    assert _SHARDS[1] in hub.requested
    assert not kept.keys() & set(hub.requested)


def test_model_on_this_machine_is_found_without_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_model("team/model")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert find_model("team/model") == folder


def test_model_that_the_hub_does_not_have_is_refused_with_the_answer_of_the_hub(hub: Hub) -> None:
    expected = rf"model 'team/no' could not be downloaded from {os.environ['HF_ENDPOINT']} "
    expected += "(?s:.*)Repository Not Found"
    with pytest.raises(ConfigError, match=expected + r"(?s:.*)\); check the name"):
        find_model("team/no")


def test_code_of_a_model_is_downloaded_at_the_trusted_commit_alone(
    hub: Hub, tmp_path: Path
) -> None:
    find_model("team/model")
    assert not [path for path in _model(tmp_path) if path.endswith(".py")]
    hub.requested.clear()
    folder = find_model("team/model", _REVISION)
    code = {"modeling_custom.py", "1_Custom/modeling_custom.py"}
    assert (
        folder.name == _REVISION and set(hub.requested) == code and code < _model(tmp_path).keys()
    )
    hub.requested.clear()
    assert find_model("team/model", _REVISION) == folder and hub.requested == []
    with pytest.raises(
        ConfigError, match=r"'team/model' is a model of the hub: expected the full commit"
    ):
        find_model("team/model", "a" * 64)
