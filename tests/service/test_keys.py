"""API keys: who is asked for one, and a file that changes while the service runs."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.app import service_app
from surge_dagster.service.keys import ApiKeys
from surge_dagster.service.settings import ServiceSettings
from tests.service.fake_spaces import FakeSpaces, post


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# search team\n{digest('one')}  -\n\n{digest('zwei ü').upper()} # batch\n")
    return path


def test_key_is_asked_for_by_all_but_the_probes(file: Path) -> None:
    client = TestClient(service_app(FakeSpaces().as_served(), ServiceSettings(api_keys=file)))
    for path in ("/healthz", "/readyz"):
        assert client.get(path).status_code == 200
    for path in ("/metrics", "/openapi.json", "/v1/models", "/v1/models/current", "/other"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for wrong in (
        "",
        "one",
        "Basic one",
        "Bearer",
        "Bearer two",
        f"Bearer {digest('one')}",
        "Bearer one two",
    ):
        client.headers["authorization"] = wrong
        assert post(client).status_code == 401
    del client.headers["authorization"]
    for right in ("Bearer one", "bearer one ", "Bearer zwei ü"):
        sent = [(b"authorization", right.encode())]
        assert client.get("/v1/models", headers=sent).status_code == 200
        assert client.get("/metrics", headers=sent).status_code == 200


def test_keys_are_read_again_when_the_file_has_changed(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(file)
    assert keys.accept(b"one") and not keys.accept(b"three")
    file.write_text(f"{digest('three')}\n")
    assert keys.accept(b"three") and not keys.accept(b"one")
    with caplog.at_level(logging.WARNING):
        for damage in (lambda: file.write_text("no digest\n"), file.unlink):
            damage()
            assert keys.accept(b"three") and keys.accept(b"three"), (
                "a mistake in the file locks nobody out"
            )
    assert ["line 1" in record.message for record in caplog.records] == [True, False], (
        "said once each"
    )
    file.write_text(f"{digest('four')}\n")
    assert keys.accept(b"four") and not keys.accept(b"three")


@pytest.mark.parametrize("content", ["", "# all keys are taken back\n"])
def test_file_that_was_emptied_leaves_no_key(
    file: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(file)
    file.write_text(content)
    assert not keys.accept(b"one") and not keys.accept(b"")
    file.unlink()
    assert not keys.accept(b"one")
    assert len(caplog.records) == 1, "of the file that is missing"
    file.write_text(digest("one"))
    assert keys.accept(b"one")


def test_empty_key_is_none_whatever_the_file_has(file: Path) -> None:
    file.write_text(f"{digest('')}  -\n{digest('one')}\n")
    client = TestClient(service_app(FakeSpaces().as_served(), ServiceSettings(api_keys=file)))
    for sent, status in ((b"Bearer ", 401), (b"Bearer", 401), (b"Bearer one", 200)):
        assert client.get("/v1/models", headers=[(b"authorization", sent)]).status_code == status


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"{'0' * 64}\n\nsecret\n", "line 3 is none"),
        ("# none yet\n", "it has none"),
        (f"{'0' * 63}\n", "line 1 is none"),
        (b"\xff\xfe", "cannot be read"),
        (None, "No such file"),
    ],
)
def test_wrong_file_is_refused_at_the_start(
    tmp_path: Path, content: str | bytes | None, said: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=said) as refused:
        service_app(FakeSpaces().as_served(), ServiceSettings(api_keys=path))
    assert str(path) in str(refused.value) and "secret" not in str(refused.value)
