"""Vector spaces: equal content has the same name wherever its files are, other content has another
name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from surge_dagster.engine.encoder.worker.backends import BackendSettings
from surge_dagster.engine.encoder.worker.loading import load_backend
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model import locating
from surge_dagster.engine.model.spec import EncodingSpec, space_from_json
from tests.engine.model.small_model import model_folder, small_tensors


@pytest.fixture
def hub_home(tmp_path: Path, demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache in the layout of the hub's client: blobs, and a snapshot of links to
    them."""
    repository = tmp_path / "hf" / "hub" / "models--sentence-transformers--all-MiniLM-L6-v2"
    snapshot = repository / "snapshots" / "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for number, file in enumerate(
        sorted(path for path in demo_folder.rglob("*") if path.is_file())
    ):
        blob = repository / "blobs" / f"{number:040x}"
        # A link instead of a copy of 90 MB.
        blob.symlink_to(file)
        link = snapshot / file.relative_to(demo_folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (snapshot / "onnx").mkdir()
    (snapshot / "onnx" / "model.onnx").write_bytes(b"not looked at")
    (snapshot / "pytorch_model.bin").write_bytes(b"not looked at")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return snapshot


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "tiny-model")


def _name(folder: Path) -> str:
    return EncodingSpec(model=str(folder)).resolve().name


def test_hub_name_hub_folder_package_and_copy_share_a_space(
    hub_home: Path, demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = EncodingSpec().resolve()
    assert by_name.model_path == str(hub_home)
    copy = tmp_path / "some-other-name"
    shutil.copytree(
        demo_folder, copy, copy_function=lambda source, target: Path(target).symlink_to(source)
    )
    (copy / "README.md").unlink()
    names = {_name(hub_home), _name(demo_folder), _name(copy), by_name.name}
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    by_package = EncodingSpec().resolve()
    assert by_package.model_path == str(demo_folder)
    assert names | {by_package.name} == {by_name.name}
    assert by_name.name.startswith("all-MiniLM-L6-v2-")
    assert (by_name.max_length, by_name.dimension, by_name.normalize, by_name.prompt) == (
        256,
        384,
        True,
        "",
    )


def test_space_of_the_demo_model_keeps_its_published_name(demo_folder: Path) -> None:
    space = EncodingSpec(str(demo_folder)).resolve()
    assert space.name == "all-MiniLM-L6-v2-2d1ab2f3c277"
    assert EncodingSpec("hash://8").resolve().name == "hash-8-1f080a0d6466"


def test_files_that_shape_no_vector_do_not_change_the_space(small_model: Path) -> None:
    before = _name(small_model)
    (small_model / "README.md").write_text("# A model")
    (small_model / "training_args.json").write_text("{}")
    (small_model / "checkpoint-500").mkdir()
    (small_model / "checkpoint-500" / "config.json").write_text("{}")
    assert _name(small_model) == before


def test_model_that_was_saved_again_is_another_space(small_model: Path) -> None:
    before = _name(small_model)
    config = json.loads((small_model / "config.json").read_text())
    (small_model / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}))
    assert _name(small_model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: save_file(
            small_tensors() | {"b": np.zeros(4, np.float16)}, folder / "model.safetensors"
        ),
        lambda folder: save_file(
            small_tensors() | {"b": np.ones(4, np.float32)}, folder / "model.safetensors"
        ),
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vocab": {"x": 1}}}'),
        lambda folder: (folder / "config.json").write_text(
            '{"model_type": "bert", "hidden_act": "relu"}'
        ),
        lambda folder: (folder / "1_Pooling" / "config.json").write_text(
            '{"word_embedding_dimension": 8, "pooling_mode_cls_token": true}'
        ),
        lambda folder: (folder / "modules.json").write_text(
            json.dumps(json.loads((folder / "modules.json").read_text())[:2])
        ),
        lambda folder: (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 17}'),
        lambda folder: (folder / "tokenizer_config.json").write_text('{"padding_side": "left"}'),
        lambda folder: (folder / "special_tokens_map.json").write_text('{"cls_token": "the"}'),
        lambda folder: _replace_pooling_type(
            folder, "sentence_transformers.sparse_encoder.modules.Pooling"
        ),
    ],
    ids=[
        "a weight",
        "a type",
        "tokenizer",
        "activation",
        "pooling",
        "no normalization",
        "max length",
        "tokenizer settings",
        "special tokens",
        "a module",
    ],
)
def test_changed_content_gives_another_space(small_model: Path, change) -> None:
    before = _name(small_model)
    change(small_model)
    assert _name(small_model) != before


def test_weights_overwritten_in_place_with_their_time_kept_give_another_space(
    small_model: Path,
) -> None:
    before = _name(small_model)
    weights = small_model / "model.safetensors"
    status = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    with weights.open("r+b") as file:
        file.write(content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
    )
    assert _name(small_model) != before


def test_every_setting_that_shapes_a_vector_gives_another_space(small_model: Path) -> None:
    model = str(small_model)
    specs = [
        EncodingSpec(model),
        EncodingSpec(model, document_prompt="query: "),
        EncodingSpec(model, query_prompt="query: "),
        EncodingSpec(model, max_length=15),
        EncodingSpec(model, normalize=False),
        EncodingSpec(model, dimension=4),
        EncodingSpec(model, dtype="float16"),
        EncodingSpec("hash://8"),
        EncodingSpec("hash://9"),
    ]
    assert len({spec.resolve().name for spec in specs}) == len(specs)
    # Explicit settings that equal the model's own give the same space.
    said = EncodingSpec(
        model,
        document_prompt="",
        query_prompt="",
        max_length=16,
        normalize=True,
        dimension=8,
        dtype="float32",
    )
    assert said.resolve().name == EncodingSpec(model).resolve().name


def test_space_json_describes_the_space_without_paths_of_this_machine(small_model: Path) -> None:
    space = EncodingSpec(str(small_model), document_prompt="x").resolve()
    document = json.loads(json.dumps(space.to_json()))
    assert str(small_model.parent) not in json.dumps(document)
    read = space_from_json(document)
    assert (read.name, read.model_path, read.spec_sha256) == (space.name, "", space.spec_sha256)
    with pytest.raises(ConfigError, match="changed by hand"):
        space_from_json(document | {"max_length": 17})
    with pytest.raises(ConfigError, match="use the version that wrote it"):
        space_from_json(document | {"format": 2})
    with pytest.raises(ConfigError, match="incomplete"):
        space_from_json({"format": 1, "name": "x"})


def test_missing_shard_damaged_file_and_other_format_are_refused(small_model: Path) -> None:
    (small_model / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="download"):
        _name(small_model)
    (small_model / "model.safetensors").rename(small_model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        _name(small_model)
    (small_model / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "gone.safetensors"}}'
    )
    with pytest.raises(ConfigError, match=r"gone\.safetensors"):
        _name(small_model)


def _replace_pooling_type(folder: Path, module_type: str) -> None:
    listing = folder / "modules.json"
    content = listing.read_text()
    listing.unlink()  # a link in a hub cache
    listing.write_text(content.replace("sentence_transformers.models.Pooling", module_type))


@pytest.mark.parametrize(
    "module_type", ["evil.Pooling", "Pooling", "sentence_transformers_evil.models.Pooling"]
)
def test_model_with_a_module_outside_sentence_transformers_is_refused_and_not_imported(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, module_type: str
) -> None:
    space = EncodingSpec(str(small_model)).resolve()
    _replace_pooling_type(small_model, module_type)
    (small_model / "evil.py").write_text(f"open({str(small_model / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(small_model)
    expected = rf"type '{re.escape(module_type)}' in modules\.json, which is code of its own"
    with pytest.raises(ConfigError, match=expected):
        EncodingSpec(str(small_model)).resolve()
    settings = BackendSettings(device="cpu", precision="fp32", threads=1)
    with pytest.raises(ConfigError, match=expected):
        load_backend(space, settings, "torch")
    assert not (small_model / "ran").exists()


@pytest.mark.parametrize("kind", ["models.Router", "models.Asym", "base.modules.router.Router"])
def test_model_with_a_route_for_queries_is_refused(small_model: Path, kind: str) -> None:
    _replace_pooling_type(small_model, f"sentence_transformers.{kind}")
    with pytest.raises(ConfigError, match="sends queries through modules of their own"):
        EncodingSpec(str(small_model)).resolve()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("evil.Pooling", r"'evil\.Pooling'"),
        ("sentence_transformers.models.Router", "modules of their own"),
    ],
)
def test_cached_model_that_is_refused_is_not_downloaded_again(
    hub_home: Path, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _replace_pooling_type(hub_home, kind)
    with pytest.raises(ConfigError, match=reason):
        EncodingSpec().resolve()


def test_snapshot_without_the_weights_of_a_module_is_not_used(hub_home: Path) -> None:
    """Such a snapshot comes from an interrupted download."""
    assert locating._in_hub_cache("all-MiniLM-L6-v2") == hub_home
    listing = hub_home / "modules.json"
    modules = [
        *json.loads(listing.read_text()),
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
    ]
    listing.unlink()
    listing.write_text(json.dumps(modules))
    (hub_home / "2_Dense").mkdir()
    (hub_home / "2_Dense" / "config.json").write_text("{}")
    assert locating._in_hub_cache("all-MiniLM-L6-v2") is None


def test_model_that_is_not_available_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(
        ConfigError, match=r"(?s)could not be downloaded.*hf download no-such/model"
    ):
        EncodingSpec("no-such/model").resolve()
    with pytest.raises(ConfigError, match="check the path"):
        EncodingSpec("./no/such/folder").resolve()
    with pytest.raises(ConfigError, match="neither modules"):
        _name(tmp_path)


def _state(file: Path, **facts: Any) -> None:
    document = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(document | facts))


@pytest.mark.parametrize(
    ("config", "positions", "longest"),
    [
        ({"model_type": "bert"}, 66, 66),
        ({"model_type": "roberta"}, 66, 64),
        ({"model_type": "xlm-roberta", "pad_token_id": 1}, 66, 64),
        ({"model_type": "camembert", "pad_token_id": 3}, 66, 62),
        ({"model_type": "mpnet"}, 66, 64),
        ({"model_type": "longformer", "pad_token_id": 1}, 66, 64),
        ({"model_type": "esm", "pad_token_id": 1}, 66, 64),
        ({"model_type": "esm", "position_embedding_type": "rotary"}, 66, 66),
    ],
)
def test_model_reads_as_many_tokens_as_it_has_positions_for(
    small_model: Path, config: dict[str, Any], positions: int, longest: int
) -> None:
    (small_model / "sentence_bert_config.json").unlink()
    _state(small_model / "config.json", max_position_embeddings=positions, **config)
    model = str(small_model)
    assert EncodingSpec(model).resolve().max_length == longest
    assert EncodingSpec(model, max_length=longest).resolve().max_length == longest
    with pytest.raises(ConfigError, match=f"reads at most {longest} tokens; max_length"):
        EncodingSpec(model, max_length=longest + 1).resolve()


@pytest.mark.parametrize(
    ("name", "facts", "stated", "longest"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 512}, 512, 32),
        ("sentence_xlm-roberta_config.json", {"max_seq_length": 512}, 512, 32),
        ("config.json", {"model_type": "roberta"}, 32, 30),
    ],
)
def test_file_that_states_more_tokens_than_the_model_reads_is_named_once(
    small_model: Path,
    name: str,
    facts: dict[str, Any],
    stated: int,
    longest: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (small_model / "sentence_bert_config.json").unlink()
    _state(small_model / name, **facts)
    for _ in range(2):
        assert EncodingSpec(str(small_model)).resolve().max_length == longest
    assert caplog.messages == [
        f"{small_model / name} states {stated} tokens, and the model has positions for {longest}: "
        f"it reads {longest} of each text"
    ]


def test_smaller_limit_of_tokenizer_and_positions_is_taken_as_by_sentence_transformers(
    small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small_model / "sentence_bert_config.json").unlink()
    for stated, expected in ((20, 20), (131_072, 32)):
        _state(small_model / "tokenizer_config.json", model_max_length=stated)
        assert EncodingSpec(str(small_model)).resolve().max_length == expected
    assert caplog.messages == []


def test_model_without_a_limit_reads_512_tokens(
    small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small_model / "sentence_bert_config.json").unlink()
    _state(small_model / "tokenizer_config.json", model_max_length=10**30)
    _state(small_model / "config.json", max_position_embeddings=-1)
    assert EncodingSpec(str(small_model)).resolve().max_length == 512
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"model": ""}, "is empty"),
        ({"dtype": "int8"}, "float32, float16"),
        ({"dimension": 0}, "at least 1"),
        ({"dimension": 9}, "8 dimensions"),
        ({"max_length": 2}, "at least 3"),
        ({"max_length": 33}, "32 tokens"),
        ({"model": "hash://"}, "followed by a dimension"),
        ({"model": "hash://8", "dimension": 4}, "no others"),
        ({"model": "hash://8", "normalize": False}, "no others"),
    ],
)
def test_invalid_setting_and_one_beyond_the_model_are_refused(
    small_model: Path, arguments: dict, reason: str
) -> None:
    given: dict[str, Any] = {"model": str(small_model)} | arguments
    with pytest.raises(ConfigError, match=reason):
        EncodingSpec(**given).resolve()


def test_resolving_imports_no_torch(demo_folder: Path) -> None:
    code = (
        "import sys; from surge_dagster.engine.encoder.pool import EncoderPool;"
        "from surge_dagster.engine.model.spec import EncodingSpec;"
        f"EncodingSpec({str(demo_folder)!r}).resolve();"
        "sys.exit(bool({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
