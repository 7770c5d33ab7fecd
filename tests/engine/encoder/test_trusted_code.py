"""A model with code of its own: refused without `trust_remote_code`, its code part of the space."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.backends import BackendSettings, encode_texts
from surge_dagster.engine.encoder.worker.loading import load_backend
from surge_dagster.engine.encoder.worker.parity import load_reference, reference_vectors
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import UntrustedCode
from surge_dagster.engine.model.spec import EncodingSpec, space_from_json
from tests.engine.encoder.conftest import tiny_model

pytestmark = pytest.mark.timeout(400)

_CODE = """
import torch
from transformers import BertConfig, BertModel


class OwnConfig(BertConfig):
    model_type = "own"


class OwnModel(BertModel):
    config_class = OwnConfig

    def forward(self, *given, **named):
        found = super().forward(*given, **named)
        found["last_hidden_state"] = torch.flip(found["last_hidden_state"], [-1])
        return found
"""
_TEXTS = ["a bottle of steel", "東京", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT of random weights whose code reverses the numbers of each vector."""
    model = tiny_model("bert_cls", tmp_path)
    config = json.loads((model / "config.json").read_text())
    mapped = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "auto_map": mapped})
    )
    (model / "modeling_own.py").write_text(_CODE)
    return model


def trusted(folder: Path) -> EncodingSpec:
    """The request that the refusal says."""
    with pytest.raises(UntrustedCode) as refused:
        load_reference(EncodingSpec(str(folder)).resolve(), "cpu")
    told = re.search(
        r"set trust_remote_code to the digest of its code, ([0-9a-f]{64}); or use",
        str(refused.value),
    )
    assert told, refused.value
    return EncodingSpec(str(folder), trust_remote_code=told[1])


@pytest.mark.usefixtures("cache_folder")
def test_model_runs_with_the_code_that_its_refusal_names(folder: Path) -> None:
    space = trusted(folder).resolve()
    loaded = load_backend(space, BackendSettings("cpu", "fp32", 2, 500), "auto")
    vectors, _ = encode_texts(loaded.backend, _TEXTS, space)
    assert loaded.lowest_cosine is not None
    assert loaded.lowest_cosine >= 0.99999
    expected = reference_vectors(load_reference(space, "cpu"), space, _TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_code_is_part_of_the_space_and_other_code_is_refused(folder: Path) -> None:
    spec = trusted(folder)
    space = spec.resolve()
    assert space.model_digest != EncodingSpec(str(folder)).resolve().model_digest
    assert space.to_json()["requested"]["trust_remote_code"] == spec.trust_remote_code
    with pytest.raises(ConfigError, match="which is not run on the word of an output"):
        EncoderPool(space_from_json(space.to_json()), devices="cpu").start()
    (folder / "modeling_own.py").write_text(_CODE + "# changed")
    with pytest.raises(
        ConfigError, match=rf"trust_remote_code is {spec.trust_remote_code}, and the code in .* is "
    ):
        spec.resolve()
    for wrong in ("main", "0a52fd1"):
        with pytest.raises(ConfigError, match="expected the full commit of the model's repository"):
            replace(spec, trust_remote_code=wrong).resolve()


def test_snapshot_of_the_hub_is_trusted_by_its_commit_and_code_elsewhere_is_refused(
    folder: Path,
) -> None:
    snapshot = folder.parent / "models--team--model" / "snapshots" / ("5" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    with pytest.raises(
        UntrustedCode,
        match=f"set trust_remote_code to the full commit of its repository, {'5' * 40}",
    ):
        load_reference(EncodingSpec(str(snapshot)).resolve(), "cpu")
    spec = EncodingSpec(str(snapshot), trust_remote_code="5" * 40)
    assert spec.resolve().name.startswith("model-")
    config = json.loads((snapshot / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "team/code--modeling_own.OwnModel"
    (snapshot / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"names code in another repository \(team/code--modeling_own.OwnModel\)"
    ):
        spec.resolve()
