"""The documented nginx starts and passes on what the service needs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import openai

from surge_dagster.service.embeddings import MAX_TEXTS
from tests.service.fake_spaces import FakeSpaces, vectors_of
from tests.service.nginx import documented_proxy
from tests.service.running import serving


def test_documented_nginx_passes_requests_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"a key").hexdigest())
    texts = [f"{number} {'x' * 1_000}" for number in range(MAX_TEXTS)]
    with (
        serving(FakeSpaces().as_served(), api_keys=keys) as first,
        serving(FakeSpaces().as_served(), api_keys=keys) as second,
        documented_proxy([url.removeprefix("http://") for url in (first, second)], tmp_path) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="a key", max_retries=0) as client,
    ):
        answer = client.embeddings.create(model="current", input=texts)

    assert [each.embedding for each in answer.data] == vectors_of(texts)
