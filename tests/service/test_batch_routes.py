"""Paths of files and batches: what OpenAI's client does with them, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from surge_dagster.service.app import service_app
from surge_dagster.service.settings import ServiceSettings
from tests.service.batch_files import DOCUMENTS, QUERIES, line, numbers, vector
from tests.service.fake_spaces import FakeSpaces
from tests.service.running import serving, wait_until


@pytest.fixture
def spaces() -> FakeSpaces:
    spaces = FakeSpaces()
    spaces.only.queries.waiting_tokens = 0
    return spaces


@pytest.mark.parametrize("root", ["/v1", "/documents/v1"])
def test_openais_client_gets_the_vectors_of_the_endpoint(
    spaces: FakeSpaces, tmp_path: Path, root: str
) -> None:
    lines = [
        line("float", "red"),
        line("base64", "green", encoding_format="base64"),
        line("several", ["red", "", "blue"], dimensions=8),
        line("document", "red", DOCUMENTS),
        line("query", "red", DOCUMENTS, input_type="query"),
    ]
    with (
        serving(spaces.as_served(), batches=tmp_path / "batches") as url,
        openai.OpenAI(base_url=f"{url}{root}", api_key="none", max_retries=0) as client,
    ):
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        assert client.files.retrieve(file.id) == file
        assert (file.bytes, file.filename, file.purpose) == (
            len("\n".join(lines)),
            "in.jsonl",
            "batch",
        )
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/embeddings",
            completion_window="24h",
            metadata={"of": "tests"},
        )
        assert (batch.model, batch.metadata) == (spaces.only.space.name, {"of": "tests"})
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert batch.request_counts is not None and batch.error_file_id is None
        assert (
            batch.request_counts.total,
            batch.request_counts.completed,
            batch.request_counts.failed,
        ) == (5, 5, 0)
        assert {each.id for each in client.files.list()} == {file.id, batch.output_file_id}
        assert [each.id for each in client.files.list(purpose="batch_output")] == [
            batch.output_file_id
        ]
        text = client.files.content(batch.output_file_id or "").text
        answers = {each["custom_id"]: each for each in map(json.loads, text.splitlines())}
        for each, fields in ((json.loads(each), json.loads(each)["body"]) for each in lines):
            answer = answers.pop(each["custom_id"])
            assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
            is_document = root != "/v1" or each["url"] == DOCUMENTS
            side = fields.pop("input_type", None) or ("document" if is_document else "query")
            expected = client.embeddings.create(**fields, extra_body={"input_type": side})
            assert answer["response"]["body"]["model"] == expected.model
            assert len(answer["response"]["body"]["data"]) == len(expected.data)
            for row, found in enumerate(expected.data):
                assert vector(answer, row) == numbers(found.embedding)
        assert not answers
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match=file.id):
            client.files.retrieve(file.id)
        with pytest.raises(openai.ConflictError, match="is completed"):
            client.batches.cancel(batch.id)


@pytest.fixture
def client(spaces: FakeSpaces, tmp_path: Path) -> Iterator[TestClient]:
    settings = ServiceSettings(batches=tmp_path / "batches", max_file_bytes=5000)
    app = service_app(spaces.as_served(), settings)
    with app.state.batches, TestClient(app) as client:
        yield client


def test_lists_have_pages_in_both_orders(client: TestClient) -> None:
    posted = [
        client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x"}).json()
        for _ in range(5)
    ]
    made = [each["id"] for each in posted]
    assert made == sorted(made)
    for order, expected in (("asc", made), ("desc", made[::-1]), (None, made[::-1])):
        found, more, after = [], True, None
        while more:
            page = client.get(
                "/v1/files", params={"limit": 2, "after": after, "order": order}
            ).json()
            found += [each["id"] for each in page["data"]]
            assert (page["first_id"], page["last_id"]) == (
                page["data"][0]["id"],
                page["data"][-1]["id"],
            )
            more, after = page["has_more"], page["last_id"]
        assert found == expected
    assert client.get("/v1/batches").json()["data"] == []
    assert client.get("/v1/files", params={"limit": "many"}).status_code == 400


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ({"data": {"purpose": "batch"}}, 415, "unsupported_media_type"),
        ({"files": {"other": b"x"}}, 400, "missing_required_parameter"),
        ({"files": {"file": b"x"}}, 400, "missing_required_parameter"),
        ({"data": {"purpose": "fun"}, "files": {"file": b"x"}}, 400, "invalid_value"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x" * 5000}}, 413, "request_too_large"),
        (
            {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
            400,
            "invalid_form",
        ),
        (
            {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}},
            400,
            "invalid_form",
        ),
    ],
)
def test_wrong_upload_is_refused_and_leaves_nothing(
    client: TestClient, tmp_path: Path, sent: dict[str, Any], status: int, code: str
) -> None:
    answer = client.post("/v1/files", **sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert [
        path.name
        for path in (tmp_path / "batches" / "files").iterdir()
        if not path.name.startswith(".")
    ] == []


def test_batch_of_a_wrong_file_or_with_wrong_fields_is_refused(client: TestClient) -> None:
    right = {"endpoint": QUERIES, "completion_window": "24h"}
    empty, wrong = (
        client.post("/v1/files", data={"purpose": "batch"}, files={"file": content}).json()["id"]
        for content in (b"\n \n", b"{}")
    )
    for fields, status, param in (
        (right | {"input_file_id": empty}, 400, "input_file_id"),
        (right | {"input_file_id": wrong}, 400, "custom_id"),
        (right | {"input_file_id": "file-../../batches"}, 404, "id"),
        (right, 400, "input_file_id"),
        (right | {"input_file_id": wrong, "endpoint": "/v1/completions"}, 400, "endpoint"),
        (right | {"input_file_id": wrong, "completion_window": "1h"}, 400, "completion_window"),
        (right | {"input_file_id": wrong, "metadata": {"a": 1}}, 400, "metadata.a"),
    ):
        answer = client.post("/v1/batches", json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", f"/v1/files?limit={'9' * 5_000}"), ("GET", f"/v1/batches?limit={'9' * 5_000}")]
    + [(method, f"/v1/files/file-{'0' * 24}{'a' * 300}") for method in ("GET", "DELETE")],
)
def test_numbers_and_ids_of_any_length_are_refused(
    client: TestClient, method: str, path: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code in (400, 404) and len(answer.json()["error"]["message"]) < 500


@pytest.mark.parametrize(("charset", "status"), [("unicode_escape", 200), ("undefined", 400)])
def test_form_in_any_encoding_is_read_or_refused(
    client: TestClient, tmp_path: Path, charset: str, status: int
) -> None:
    kind = f"multipart/form-data; boundary=b; charset={charset}"
    name = "\\ud800" if status == 200 else "é"
    body = (
        f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; '
        f'name="file"; filename="{name}"\r\n\r\n{{}}\r\n--b--\r\n'
    )
    answer = client.post("/v1/files", content=body.encode(), headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    if status == 200:
        assert client.get(f"/v1/files/{answer.json()['id']}").json()["filename"] == "?"


def test_service_without_a_folder_says_what_to_set(spaces: FakeSpaces) -> None:
    client = TestClient(service_app(spaces.as_served(), ServiceSettings()))
    for method, path in (
        ("GET", "/v1/files"),
        ("POST", "/documents/v1/batches"),
        ("DELETE", "/v1/files/file-1"),
    ):
        answer = client.request(method, path)
        assert answer.status_code == 501 and "--batches FOLDER" in answer.json()["error"]["message"]
