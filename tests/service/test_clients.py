"""Clients of OpenAI's API as people install them: each gets the vectors that search and the files
have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store import open_store
from surge_dagster.service.spaces import LaneSettings, ServedSpaces
from tests.engine.encoder.conftest import tiny_model
from tests.service.running import serving

# Installing them takes about a minute.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

CLIENTS = Path(__file__).parent / "clients"
PACKAGES = (
    "litellm==1.110.2",
    "langchain-openai==1.7.4",
    "langchain-tests==1.1.9",
    "llama-index-embeddings-openai==0.7.0",
    "haystack-ai==3.4.1",
)
TEXTS = ["steel bottle", "Größe 42", "steel bottle", "a lamp for the desk"]
TASKS: dict[Task, str] = {"query": "/v1", "document": "/documents/v1"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a service for a model that encodes queries and documents in two ways."""
    folder = tmp_path_factory.mktemp("clients")
    spec = prompted(tiny_model("bert_cls", folder))
    store = open_store(folder / "output")
    claim_space(store, spec.resolve())
    with ServedSpaces(store, LaneSettings("cpu")) as spaces:
        spaces.start()
        with serving(spaces) as url:
            yield url


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that has the clients."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, *PACKAGES], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """A command with the client for JavaScript."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("node")
    subprocess.run(["npm", "install", "--silent", "--prefix", folder, "openai@7"], check=True)
    shutil.copy(CLIENTS / "node_client.mjs", folder)
    return ["node", folder / "node_client.mjs"]


def prompted(model: Path) -> EncodingSpec:
    return EncodingSpec(str(model), document_prompt="passage: ", query_prompt="query: ")


def vectors_of(task: Task, model: Path) -> np.ndarray:
    with EncoderPool(prompted(model), task=task, devices="cpu") as pool:
        return pool.vectors(pa.array(TEXTS, pa.large_string()))


def require_vectors(command: Sequence[str | Path], url: str, tmp_path: Path) -> None:
    model = tiny_model("bert_cls", tmp_path)
    expected = {task: vectors_of(task, model) for task in TASKS}
    assert not np.allclose(expected["query"], expected["document"], atol=1e-3)
    for task, root in TASKS.items():
        ended = subprocess.run(
            [*command, url + root], input=json.dumps(TEXTS), stdout=-1, text=True, check=True
        )
        found = np.array(json.loads(ended.stdout.splitlines()[-1]), np.float32)
        assert np.allclose(found, expected[task], atol=1e-5)


@pytest.mark.parametrize("client", ["litellm", "langchain", "llama_index", "haystack"])
def test_client_for_python_gets_the_vectors_of_its_base_url(
    client: str, url: str, python: Path, tmp_path: Path
) -> None:
    require_vectors([python, CLIENTS / "python_clients.py", client], url, tmp_path)


@pytest.mark.parametrize("root", TASKS.values())
def test_service_passes_the_suite_of_langchain(root: str, url: str, python: Path) -> None:
    suite = (CLIENTS / "langchain_suite.py", "-c", os.devnull, "-o", "asyncio_mode=auto")
    ended = subprocess.run(
        [python, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *suite],
        env=os.environ | {"SURGE_URL": url + root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout


def test_client_for_javascript_gets_the_vectors_of_its_base_url(
    url: str, node: list[str | Path], tmp_path: Path
) -> None:
    require_vectors(node, url, tmp_path)
