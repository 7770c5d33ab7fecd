"""API keys: who is asked for one, and a file that changes while the service runs."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.gate import ApiKeys
from tests.service.fake_spaces import FakeSpaces, error_of
from tests.service.running import client_of


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# search team\n{digest('one')}  -\n\n{digest('zwei ü').upper()} # batch\n")
    return path


@pytest.fixture
def client(file: Path) -> TestClient:
    return client_of(FakeSpaces(), api_keys=file)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_need_no_key(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/openapi.json", "/v1/models", "/other"])
def test_all_other_paths_need_a_key(client: TestClient, path: str) -> None:
    error = error_of(client.get(path), 401)
    assert error["code"] == "invalid_api_key"
    assert "Authorization: Bearer" in error["message"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("", 401),
        ("one", 401),
        ("Basic one", 401),
        ("Bearer", 401),
        ("Bearer two", 401),
        (f"Bearer {digest('one')}", 401),
        ("Bearer one two", 401),
        ("Bearer one", 200),
        ("bearer one ", 200),
        ("Bearer zwei ü", 200),
    ],
)
def test_key_is_read_from_the_header(client: TestClient, sent: str, status: int) -> None:
    headers = [(b"authorization", sent.encode())]
    assert client.get("/v1/models", headers=headers).status_code == status


FOREIGN: list[dict[str, str]] = [
    {"host": "evil.example:8080"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "10.0.0.7:8080"},
    {"host": ""},
    {"origin": "https://evil.example"},
    {"origin": "http://localhost.evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/other"])
def test_service_without_keys_refuses_pages_of_other_sites(
    headers: dict[str, str], path: str
) -> None:
    answer = client_of(FakeSpaces()).get(path, headers=headers)
    assert error_of(answer, 403)["code"] == "foreign_request"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "LocalHost"},
        {"host": "127.0.0.1:8080"},
        {"host": "[::1]:8080"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    ],
)
def test_service_without_keys_answers_this_machine(headers: dict[str, str]) -> None:
    assert client_of(FakeSpaces()).get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", FOREIGN)
def test_service_with_keys_has_any_name(client: TestClient, headers: dict[str, str]) -> None:
    key = {"authorization": "Bearer one"}
    assert client.get("/v1/models", headers=headers | key).status_code == 200


def test_keys_are_read_again_when_the_file_has_changed(file: Path) -> None:
    keys = ApiKeys(file)
    assert keys.accept(digest("one"))

    file.write_text(f"{digest('three')}\n")

    assert keys.accept(digest("three"))
    assert not keys.accept(digest("one"))


def test_mistake_in_the_file_locks_nobody_out(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(file)
    with caplog.at_level(logging.WARNING):
        for damage in (lambda: file.write_text("no digest\n"), file.unlink):
            damage()
            assert keys.accept(digest("one"))
            assert keys.accept(digest("one"))
    said = [record.message for record in caplog.records]
    assert len(said) == 2, "once each"
    assert "Line 1" in said[0]


@pytest.mark.parametrize("content", ["", "# all keys are taken back\n"])
def test_file_that_was_emptied_leaves_no_key(file: Path, content: str) -> None:
    keys = ApiKeys(file)
    file.write_text(content)
    assert not keys.accept(digest("one"))


def test_empty_key_is_wrong_whatever_the_file_has(file: Path) -> None:
    file.write_text(f"{digest('')}  -\n{digest('one')}\n")
    assert not ApiKeys(file).accept(digest(""))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"{'0' * 64}\n\nsecret\n", "Line 3 is not a SHA-256"),
        ("# no key\n", "It has no line"),
        (f"{'0' * 63}\n", "Line 1 is not a SHA-256"),
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
        ApiKeys(path)

    assert "secret" not in str(refused.value)
