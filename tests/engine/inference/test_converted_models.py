"""Converted models on disk: converted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster.engine.encoder.worker.backends import BackendSettings
from surge_dagster.engine.encoder.worker.loading import load_backend
from surge_dagster.engine.encoder.worker.tokenization import TokenizerFacts
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from tests.engine.encoder.conftest import tiny_model
from tests.extras import require

require("cpu", "openvino")

pytestmark = pytest.mark.timeout(400)

_SETTINGS = BackendSettings(device="cpu", precision="fp32", threads=1, token_budget=500)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "openvino"


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Space:
    return EncodingSpec(
        str(tiny_model("static_embedding", tmp_path_factory.mktemp("static")))
    ).resolve()


def _write_as_if_converted(space: Space, folder: Path) -> TokenizerFacts:
    for name in ("model.xml", "model.bin"):
        (folder / name).touch()
    return TokenizerFacts("{}")


def test_conversion_that_fails_leaves_nothing(
    cache: Path, static: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(space: Space, folder: Path) -> TokenizerFacts:
        raise ConfigError("cannot be converted")

    from surge_dagster.engine.inference import openvino_backend

    monkeypatch.setattr(openvino_backend, "_convert", fail)
    with pytest.raises(ConfigError, match="cannot be converted"):
        openvino_backend.converted_model(static)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_model_that_cannot_be_converted_goes_through_torch(cache: Path, static: Space) -> None:
    loaded = load_backend(static, _SETTINGS, "auto")

    assert loaded.notes == (
        "torch is used instead of openvino: this model's texts do not go through a plain fast "
        "tokenizer",
    )
    assert "through sentence-transformers' encode" in loaded.backend.detail


def test_model_is_converted_once(
    cache: Path, static: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surge_dagster.engine.inference import openvino_backend

    monkeypatch.setattr(openvino_backend, "_convert", _write_as_if_converted)
    before = (openvino_backend.converted_model(static) / "model.bin").stat().st_ino
    assert (openvino_backend.converted_model(static) / "model.bin").stat().st_ino == before
