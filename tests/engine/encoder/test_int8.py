"""int8: vectors of their own space, whose fidelity is measured and said, from OpenVINO on the CPU and nothing else.

Quantizing the demo model, once for all of these tests, takes some 20 s on two cores, beside its conversion.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.devices import DeviceChoice, choose_devices, choose_precision, worker_threads
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker import loading
from surge_dagster.engine.encoder.worker.backends import quantized_models
from surge_dagster.engine.encoder.worker.backends.base import BackendSettings
from surge_dagster.engine.encoder.worker.backends.calibration_texts import calibration_texts, judging_texts
from surge_dagster.engine.encoder.worker.fidelity import compare, cosines
from surge_dagster.engine.encoder.worker.loading import load_backend
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space, arithmetic_of, space_from_json
from surge_dagster.engine.verify import LOWEST_COSINE
from surge_dagster.settings import load_settings
from tests.engine.encoder.conftest import encode

pytestmark = pytest.mark.timeout(900)
needs_nncf = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("nncf", "openvino")), reason="needs the extras 'cpu' and 'int8'"
)
_SETTINGS = BackendSettings(device="cpu", precision="int8", threads=1, token_budget=500)


@pytest.fixture(scope="module")
def spec(demo_folder: Path) -> EncodingSpec:
    return EncodingSpec(str(demo_folder))


@pytest.fixture(scope="module")
def int8_space(spec: EncodingSpec) -> Space:
    return replace(spec, arithmetic="int8").resolve()


@pytest.fixture(scope="module")
def int8_pool(cache_folder: Path, spec: EncodingSpec) -> Iterator[EncoderPool]:
    with EncoderPool(spec, devices="cpu", precision="int8") as pool:
        yield pool


class TestSpace:
    def test_int8_is_a_space_of_its_own_and_float_spaces_keep_the_names_they_always_had(
        self, spec: EncodingSpec, int8_space: Space
    ) -> None:
        plain = spec.resolve()
        assert plain.name == "all-MiniLM-L6-v2-6fe268ae336d"
        assert "arithmetic" not in json.dumps(plain.to_json())
        assert int8_space.name.startswith("all-MiniLM-L6-v2-")
        assert int8_space.name != plain.name
        assert int8_space.in_float() == plain

    def test_its_description_is_read_back_and_guarded(self, int8_space: Space) -> None:
        document = json.loads(json.dumps(int8_space.to_json()))
        assert document["arithmetic"] == "int8-1"
        assert document["requested"]["arithmetic"] == "int8"
        assert space_from_json(document) == replace(int8_space, model_path="")
        del document["arithmetic"]
        with pytest.raises(ConfigError, match="changed by hand"):
            space_from_json(document)

    def test_the_precision_setting_alone_decides(self) -> None:
        assert load_settings(precision="int8").encoding_spec() == EncodingSpec(arithmetic="int8")
        for precision in ("auto", "fp32", "fp16", "bf16"):
            assert load_settings(precision=precision).encoding_spec() == EncodingSpec()
            assert arithmetic_of(precision) == "float"
        with pytest.raises(ConfigError, match="arithmetic"):
            EncodingSpec(arithmetic="int4")


class TestRefusals:
    @pytest.mark.parametrize("backend", ["torch", "hash"])
    def test_other_backends_do_not_compute_it(self, spec: EncodingSpec, backend: str) -> None:
        with pytest.raises(ConfigError, match="use backend openvino"):
            EncoderPool(spec, devices="cpu", precision="int8", backend=backend)

    def test_a_hash_has_no_model_to_quantize(self) -> None:
        with pytest.raises(ConfigError, match="precision auto"):
            EncoderPool(EncodingSpec("hash://8"), devices="cpu", precision="int8")

    def test_a_gpu_does_not_compute_it(self) -> None:
        with pytest.raises(ConfigError, match="use fp16 or bf16 on a GPU"):
            choose_precision("int8", DeviceChoice(("cuda:0",), ""), int8=True)

    def test_a_space_and_a_precision_that_contradict_each_other_do_not_start(
        self, spec: EncodingSpec, int8_space: Space
    ) -> None:
        with pytest.raises(ConfigError, match="fp32 does not compute vectors of an int8 space"):
            EncoderPool(int8_space, devices="cpu", precision="fp32")
        with pytest.raises(ConfigError, match="int8 does not compute vectors of a float space"):
            EncoderPool(spec.resolve(), devices="cpu", precision="int8")

    def test_auto_is_never_int8(self) -> None:
        assert choose_precision("auto", DeviceChoice(("cpu",), "")) == "fp32"

    def test_without_nncf_the_command_that_installs_it_is_named(
        self, int8_space: Space, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("openvino", reason="needs the extra 'cpu'")
        monkeypatch.setattr(quantized_models, "library_version", lambda name: "")
        with pytest.raises(ConfigError, match=r'pip install "surge-dagster\[cpu,int8\]"'):
            load_backend(int8_space, _SETTINGS, "auto", check_parity=False)

    def test_without_openvino_nothing_steps_in(self, int8_space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
        for backend in ("auto", "openvino"):
            with pytest.raises(ConfigError, match=r'pip install "surge-dagster\[cpu,int8\]"'):
                load_backend(int8_space, _SETTINGS, backend, check_parity=False)


class TestTexts:
    def test_calibration_and_judgement_use_the_same_texts_everywhere_and_not_the_same_as_each_other(self) -> None:
        assert calibration_texts(50) == calibration_texts(80)[:50]
        assert len(set(judging_texts(300))) == 300
        words = [len(text.split()) for text in calibration_texts(80)]
        assert min(words) == 1
        assert max(words) > 100


@needs_nncf
@pytest.mark.soak
class TestVectors:
    """Quantizing the real model takes a minute of two cores."""

    def test_they_are_near_those_of_fp32_and_find_nearly_the_same(
        self, int8_pool: EncoderPool, model_pool: EncoderPool
    ) -> None:
        texts = [f"{text} {number}" for number, text in enumerate(judging_texts(200))]
        found = compare(encode(int8_pool, texts), encode(model_pool, texts), texts)
        assert found.lowest_cosine > 0.95
        assert found.mean_cosine > 0.98
        assert found.equal_neighbours is not None
        assert found.equal_neighbours > 0.8
        assert found.lowest_cosine < 0.99999, "these are not the vectors of a quantized model"

    def test_the_start_says_what_they_are_worth(self, int8_pool: EncoderPool) -> None:
        assert (int8_pool.precision, int8_pool.backend) == ("int8", "openvino")
        assert int8_pool.lowest_cosine is not None
        assert int8_pool.lowest_cosine > 0.85
        (note,) = int8_pool.notes
        assert f"lowest cosine {int8_pool.lowest_cosine:.4f}" in note
        assert "of the ten nearest texts the same" in note
        assert note in int8_pool.device_reason

    def test_the_company_of_a_text_hardly_changes_its_vector(self, int8_pool: EncoderPool) -> None:
        texts = [*calibration_texts(60), "", " ", "a " * 300]
        together = encode(int8_pool, texts)
        backwards = encode(int8_pool, texts[::-1])[::-1]
        assert cosines(together, backwards).min() >= LOWEST_COSINE["int8"]
        for row in range(0, len(texts), 7):
            assert cosines(encode(int8_pool, [texts[row]]), together[row : row + 1]).min() >= LOWEST_COSINE["int8"]

    def test_the_next_start_quantizes_nothing_and_gives_the_same_vectors(
        self, int8_pool: EncoderPool, int8_space: Space, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(space: Space, folder: Path) -> dict:
            raise AssertionError("it was quantized again")

        monkeypatch.setattr(quantized_models, "_quantize", never)
        assert len(list((cache_folder / "openvino-int8").glob("*/facts.json"))) == 1
        threads = worker_threads(choose_devices("cpu"))
        again = load_backend(int8_space, replace(_SETTINGS, threads=threads), "auto", check_parity=True)
        assert again.notes == int8_pool.notes
        texts = judging_texts(20)
        matrix, flags = np.empty((20, 384), np.float32), np.empty(20, np.uint8)
        again.backend.forward(again.backend.prepare(texts, lambda: None), matrix, flags, lambda: None)
        assert cosines(matrix, encode(int8_pool, texts)).min() >= LOWEST_COSINE["int8"]

    def test_embed_then_verify_then_search_follow_the_space_that_is_there(
        self, int8_pool: EncoderPool, demo_folder: Path, tmp_path: Path
    ) -> None:
        """Takes half a minute: four processes, three of which load the model."""
        for key in ("shapes", "tools"):
            folder = tmp_path / "catalog" / f"partition={key}"
            folder.mkdir(parents=True)
            texts = [f"{key}: {text}" for text in judging_texts(60)]
            pq.write_table(pa.table({"id": [str(row) for row in range(60)], "text": texts}), folder / "part-0.parquet")
        model = ("--model", str(demo_folder), "--devices", "cpu")
        report = _surge(tmp_path, "embed", "catalog", "out", *model, "--precision", "int8", "--json")
        assert report["space"] == int8_pool.space.name
        assert report["precision"] == "int8"
        assert report["encoder_notes"] == int8_pool.notes
        verified = _surge(tmp_path, "verify", "catalog", "out", *model, "--reencode", "all", "--json")
        assert verified["violations"] == []
        query = "tools: How do I get a coffee stain out of a carpet made of wool?"
        found = _surge(tmp_path, "search", "out", query, *model, "-k", "1", "--json")
        assert found["hits"][0]["text"] == "tools: How do I remove a coffee stain from a wool carpet?"
        refused = _finish(tmp_path, "search", "out", "x", *model, "--precision", "fp32")
        assert refused.returncode == 2
        assert "--precision" in refused.stderr


def _finish(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from surge_dagster.cli import main; main()", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=dict(os.environ), capture_output=True, text=True, timeout=200, check=False
    )


def _surge(cwd: Path, *arguments: str) -> dict:
    finished = _finish(cwd, *arguments)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.strip().splitlines()[-1])
