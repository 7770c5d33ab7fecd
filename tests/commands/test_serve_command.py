"""`surge-dagster serve`: a process that answers until SIGTERM, in the space of the output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.worker.backends import hash_vectors
from tests.command import Command
from tests.small_catalogs import read_embedded

pytestmark = pytest.mark.processes

PROMPTS = ("--document-prompt", "keep: ", "--query-prompt", "find: ")


@dataclass(frozen=True, slots=True)
class Service:
    process: subprocess.Popen[str]
    url: str
    said: list[str]

    def embed(self, path: str, **body: Any) -> tuple[np.ndarray, str]:
        """Vectors and the name of their space."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps({"model": "current"} | body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            document = json.load(answer)
        return np.array([each["embedding"] for each in document["data"]], np.float32), document[
            "model"
        ]


@contextmanager
def serving(root: Path, *arguments: str) -> Iterator[Service]:
    command = [sys.executable, "-m", "surge_dagster", "serve", "out", "--port", "0", *arguments]
    with subprocess.Popen(
        command, cwd=root, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stderr is not None
        try:
            said = list[str]()
            while not said or not said[-1].startswith("listening on "):
                said.append(process.stderr.readline())
                assert said[-1], f"it ended: {said}"
            yield Service(process, said[-1].split()[2], said)
        finally:
            process.kill()


@pytest.fixture
def output(surge: Command) -> str:
    """An output `out` with prompts; the name of its space."""
    surge.write("a", 5)
    return surge.embed(*PROMPTS)["space"]


def test_documents_have_the_vectors_of_the_files_and_queries_those_of_a_search(
    surge: Command, output: str
) -> None:
    stored = read_embedded(surge.root / "out", output, "a")
    with serving(surge.root) as service:
        documents, space = service.embed("/documents/v1/embeddings", input=stored.texts)
        queries, _ = service.embed("/v1/embeddings", input=stored.texts)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0
        assert service.process.stderr and service.process.stderr.read().endswith("stopped\n")
    assert space == output
    np.testing.assert_array_equal(documents, stored.matrix)
    assert stored.texts
    np.testing.assert_array_equal(
        queries, hash_vectors([f"find: {text}" for text in stored.texts], 16)
    )
    assert service.said[0].startswith(f"{output} (current): 16 dimensions, queries within ")


def test_wrong_usage_is_refused_with_what_to_do(
    surge: Command, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "surge-dagster embed" in surge.error("serve", "nowhere")
    with monkeypatch.context() as without:
        without.setattr(
            "surge_dagster.commands.serve.find_spec",
            lambda name: None if name == "python_multipart" else ...,
        )
        error = surge.error("serve", "out")
    assert "needs python_multipart. Run: pip install 'surge-dagster[serve]'" in error
    described = surge.space_json()
    record = json.loads(described.read_text())
    record["requested"]["model"] = "owner/model"
    described.write_text(json.dumps(record))
    error = surge.error("serve", "out")
    assert "names the model 'owner/model'" in error and "--yes" in error
