"""Paths of files and batches: what OpenAI's client does with them, and what they refuse."""

from __future__ import annotations

import errno
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from tests.service.fake_spaces import FakeSpaces, error_of
from tests.service.running import client_of, serving
from tests.service.test_batches import QUERIES, line, served, vector
from tests.waiting import until


@pytest.mark.parametrize("root", ["/v1", "/documents/v1"])
def test_openais_client_gets_the_vectors_of_the_endpoint(tmp_path: Path, root: str) -> None:
    lines = [line("one", "red"), line("several", ["red", "", "blue"], dimensions=8)]
    spaces = served(tmp_path / "output")
    with (
        serving(spaces.as_served(), batches=tmp_path / "batches") as url,
        openai.OpenAI(base_url=f"{url}{root}", api_key="none", max_retries=0) as client,
    ):
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        assert client.files.retrieve(file.id) == file
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/embeddings",
            completion_window="24h",
            metadata={"of": "tests"},
        )
        assert batch.model == spaces.only.space.name
        assert batch.metadata == {"of": "tests"}

        until(lambda: client.batches.retrieve(batch.id).status == "completed")

        batch = client.batches.retrieve(batch.id)
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert {each.id for each in client.files.list()} == {file.id, batch.output_file_id}
        [found] = client.files.list(purpose="batch_output")
        assert found.id == batch.output_file_id
        answers = map(json.loads, client.files.content(found.id).text.splitlines())
        for answer, sent in zip(answers, map(json.loads, lines), strict=True):
            expected = client.embeddings.create(**sent["body"], encoding_format="float")
            assert answer["custom_id"] == sent["custom_id"]
            assert answer["response"]["body"]["model"] == expected.model
            for row, each in enumerate(expected.data):
                assert vector(answer, row) == each.embedding
        with pytest.raises(openai.ConflictError, match="has ended: completed"):
            client.batches.cancel(batch.id)
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match=file.id):
            client.files.retrieve(file.id)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with client_of(FakeSpaces(), batches=tmp_path / "batches") as client:
        yield client


def upload(client: TestClient, content: bytes = b"x") -> str:
    sent = {"data": {"purpose": "batch"}, "files": {"file": content}}
    return client.post("/v1/files", **sent).json()["id"]


def right(file_id: str) -> dict[str, Any]:
    """Return the body of a request for a batch."""
    return {"input_file_id": file_id, "endpoint": QUERIES, "completion_window": "24h"}


@pytest.mark.parametrize("order", ["asc", "desc", None])
def test_lists_have_pages_in_both_orders(client: TestClient, order: str | None) -> None:
    ids = [upload(client) for _ in range(5)]
    found = list[str]()
    after = None
    has_more = True

    while has_more:
        params = {"limit": 2, "after": after, "order": order}
        page = client.get("/v1/files", params=params).json()
        found += [each["id"] for each in page["data"]]
        has_more = page["has_more"]
        after = page["last_id"]

    assert found == (ids if order == "asc" else ids[::-1])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files/{file}"),
        ("DELETE", "/v1/files/{file}"),
        ("GET", "/v1/files/{file}/content"),
        ("GET", "/v1/batches/{batch}"),
        ("POST", "/v1/batches/{batch}/cancel"),
    ],
)
def test_files_and_batches_are_those_of_a_key(tmp_path: Path, method: str, path: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(hashlib.sha256(key).hexdigest() for key in (b"one", b"two")))
    client = client_of(FakeSpaces(), api_keys=keys, batches=tmp_path / "batches")
    client.headers["authorization"] = "Bearer one"
    file = upload(client, line("a").encode())
    batch = client.post("/v1/batches", json=right(file)).json()["id"]

    client.headers["authorization"] = "Bearer two"

    assert client.request(method, path.format(file=file, batch=batch)).status_code == 404
    for kind in ("files", "batches"):
        assert client.get(f"/v1/{kind}").json()["data"] == []
    assert client.post("/v1/batches", json=right(file)).status_code == 404


def test_file_expires_when_its_client_wants_it_to(client: TestClient) -> None:
    with openai.OpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=client
    ) as openai_client:
        file = openai_client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3_600}
        )
    assert file.expires_at == file.created_at + 3_600


FORM = {"content-type": "multipart/form-data"}
DISK_FULL = sqlite3.OperationalError("database or disk is full")
DISK_FULL.sqlite_errorcode = sqlite3.SQLITE_FULL


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        ({"files": {"other": b"x"}}, 400, "missing_required_parameter"),
        ({"files": {"file": b"x"}}, 400, "missing_required_parameter"),
        ({"data": {"purpose": "fun"}, "files": {"file": b"x"}}, 400, "invalid_value"),
        ({"content": b"x", "headers": {**FORM, "content-length": "2" * 9}}, 413, "Too Large"),
        ({"content": b"x", "headers": FORM}, 400, "invalid_body"),
    ],
)
def test_wrong_upload_is_refused_and_leaves_nothing(
    client: TestClient, tmp_path: Path, sent: dict[str, Any], status: int, said: str
) -> None:
    answer = client.post("/v1/files", **sent)
    assert answer.status_code == status
    assert said in answer.text
    assert list((tmp_path / "batches" / "files").glob("file-*")) == []


@pytest.mark.parametrize("charset", ["punycode", "idna", "utf-7", "unicode_escape", "Punycode"])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/embeddings"])
def test_form_in_another_charset_than_utf_8_is_refused(
    client: TestClient, charset: str, path: str
) -> None:
    kind = f'multipart/form-data; boundary=b; charset="{charset}"'
    part = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
    body = f"{part}a-{'b9' * 300_000}\r\n--b--\r\n"

    answer = client.post(path, content=body.encode(), headers={"content-type": kind})

    assert error_of(answer, 415)["code"] == "unsupported_charset"


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("starlette.datastructures.UploadFile.write", OSError(errno.ENOSPC, "No space left")),
        ("surge_dagster.service.records.LocalUpload.publish", OSError(errno.EDQUOT, "Quota")),
        ("surge_dagster.service.records.Records.add", DISK_FULL),
    ],
)
def test_upload_to_a_full_disk_is_refused_with_what_to_do(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, target: str, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(target, fail)

    answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x"})

    refusal = error_of(answer, 507)
    assert refusal["code"] == "insufficient_storage"
    assert "Delete files of batches" in refusal["message"]


def test_batch_on_a_full_disk_is_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DISK_FULL

    file = upload(client, line("a").encode())
    monkeypatch.setattr("surge_dagster.service.records.Records.add", fail)

    answer = client.post("/v1/batches", json=right(file))

    assert error_of(answer, 507)["type"] == "server_error"


@pytest.mark.parametrize(
    ("content", "fields", "status", "param"),
    [
        (b"\n \n", {}, 400, None),
        (b"{}", {}, 400, "custom_id"),
        (b"{}", {"input_file_id": "file-../../batches"}, 404, "id"),
        (b"{}", {"input_file_id": None}, 400, "input_file_id"),
        (b"{}", {"endpoint": "/v1/completions"}, 400, "endpoint"),
        (b"{}", {"completion_window": "1h"}, 400, "completion_window"),
        (b"{}", {"metadata": {"a": 1}}, 400, "metadata.a"),
    ],
)
def test_batch_of_a_wrong_file_or_with_wrong_fields_is_refused(
    client: TestClient, content: bytes, fields: dict[str, Any], status: int, param: str | None
) -> None:
    answer = client.post("/v1/batches", json=right(upload(client, content)) | fields)
    assert error_of(answer, status)["param"] == param


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/v1/files?limit={'9' * 5_000}"),
        ("GET", "/v1/batches?limit=many"),
        ("GET", f"/v1/files/file-{'0' * 24}{'a' * 300}"),
        ("DELETE", f"/v1/files/file-{'0' * 24}{'a' * 300}"),
    ],
)
def test_numbers_and_ids_of_any_length_are_refused(
    client: TestClient, method: str, path: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code in (400, 404)
    assert len(answer.json()["error"]["message"]) < 500


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/files"), ("POST", "/documents/v1/batches"), ("DELETE", "/v1/files/file-1")],
)
def test_service_without_a_folder_says_what_to_set(method: str, path: str) -> None:
    answer = client_of(FakeSpaces()).request(method, path)
    assert answer.status_code == 404
    assert "--batches FOLDER" in answer.json()["error"]["message"]
