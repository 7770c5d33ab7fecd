"""Packed passes on the CPU: sentence-transformers' vectors, and no buffer used before the device is
done with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from surge_dagster.engine.encoder import schedule
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker import loading, parity
from surge_dagster.engine.encoder.worker.backends import BackendSettings, Rows, encode_texts
from surge_dagster.engine.encoder.worker.parity import load_reference, reference_vectors
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.inference import torch_backend
from surge_dagster.engine.inference.torch_backend import load_model, tokenizer_facts
from surge_dagster.engine.model.spec import EncodingSpec, Space
from tests.engine.encoder.conftest import TINY_MODELS, filled_slot, tiny_model
from tests.engine.odd_texts import short_texts

# Torch takes seconds to import, which not every process that collects tests needs to spend.
if TYPE_CHECKING:
    from surge_dagster.engine.inference.device import Device
    from surge_dagster.engine.inference.packed_backend import PackedBackend

pytestmark = pytest.mark.timeout(400)

REFUSED = ("mpnet_mean", "t5_with_dense", "static_embedding")
# Its texts change each other in packed passes, which the parity check finds.
BELOW_PROMISE = "esm_with_token_dropout"
PACKED = [name for name in TINY_MODELS if name not in (*REFUSED, BELOW_PROMISE)]
COMPILES = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="torch compiles with g++ or clang++",
)


def texts() -> list[str]:
    # sentence-transformers fails on a batch of one text without tokens, as a 65th would be
    return [*short_texts(58), "<pad> and [PAD]<pad>"]


def _settings(precision: str = "fp32") -> BackendSettings:
    return BackendSettings(device="cpu", precision=precision, threads=1, token_budget=200)


def _loaded(
    folder: Path, device: Device | None = None, *, is_compiled: bool = False
) -> tuple[PackedBackend, Space, np.ndarray]:
    """The backend, on the CPU unless another device is given, its space, and sentence-transformers'
    own vectors."""
    from surge_dagster.engine.inference.device import Device
    from surge_dagster.engine.inference.packed_backend import PackedBackend, PackedOptions

    space = EncodingSpec(str(folder)).resolve()
    model = load_model(space, _settings())
    expected = reference_vectors(model, space, texts())
    facts = tokenizer_facts(model, space)
    assert facts is not None
    options = PackedOptions(is_compiled=is_compiled)
    backend = PackedBackend(space, _settings(), model, facts, device or Device(), options)
    return backend, space, expected


def test_model_comes_to_its_device_in_the_precision_that_it_has_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    loaded_on: list[str] = []

    def load(space: Space, device: str) -> Any:
        loaded_on.append(device)
        return load_reference(space, device)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch_backend, "load_reference", load)
    space = EncodingSpec(str(tiny_model("bert_several_poolings", tmp_path))).resolve()
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace())
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        model = load_model(space, replace(_settings("fp16"), device="meta"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.matmul.allow_tf32
    assert loaded_on == ["cpu"]
    assert {(weights.device.type, weights.dtype) for weights in model.parameters()} == {
        ("meta", torch.float16)
    }


@pytest.mark.parametrize("name", PACKED)
def test_packed_passes_give_the_vectors_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    from tests.engine.inference.late_device import HostWaits

    backend, space, expected = _loaded(tiny_model(name, tmp_path))
    for budget in (1, 200, 1_000_000):
        backend.token_budget = budget
        with HostWaits() as waits:
            found, costs = encode_texts(backend, texts(), space)
        assert waits.found == []
        assert parity.lowest_cosine(found, expected) >= parity.LOWEST_COSINE["fp32"]
        assert np.allclose(
            np.linalg.norm(found, axis=1), np.linalg.norm(expected, axis=1), rtol=0.001, atol=1e-4
        )
        assert costs.tokens <= costs.padded_tokens


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_packed_are_refused_and_padded_instead(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    from surge_dagster.engine.inference.packed_backend import load_packed

    space = EncodingSpec(str(tiny_model(name, tmp_path))).resolve()
    with pytest.raises(ConfigError, match=r"padded, because|plain tokens"):
        load_packed(space, _settings())
    monkeypatch.setattr(loading, "_faster_backends", lambda settings: ["packed"])
    loaded = loading.load_backend(space, _settings(), "auto")
    assert loaded.backend.name == "torch"
    assert "torch is used instead of packed" in loaded.notes[-1]


def test_model_whose_texts_change_each_other_is_padded_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    space = EncodingSpec(str(tiny_model(BELOW_PROMISE, tmp_path))).resolve()
    monkeypatch.setattr(loading, "_faster_backends", lambda settings: ["packed"])
    loaded = loading.load_backend(space, _settings(), "auto")
    assert loaded.backend.name == "torch"
    assert "differs from sentence-transformers" in loaded.notes[-1]


def test_next_portion_is_launched_before_one_is_read_and_neither_waits(tmp_path: Path) -> None:
    from tests.engine.inference.late_device import LateDevice

    device = LateDevice()
    backend, space, expected = _loaded(tiny_model("bert_cls", tmp_path), device)
    assert any(vectors is backend._of_empty_text for vectors in device.uploaded)
    count = len(texts())
    ticks = [0]
    matrix = np.full((4 * count, space.dimension), 7, np.float32)
    flags = np.zeros(len(matrix), np.uint8)
    in_a_row = np.arange(count)
    mixed = np.r_[0, count - 2 : 0 : -1, count - 1] + count + 1  # a range, in another order

    def tick() -> None:
        ticks[0] += 1

    def launch(first: int, places: np.ndarray) -> tuple[Callable[[], Any], np.ndarray, np.ndarray]:
        """Of the texts from `first` on and those before it; with their places and their vectors."""
        device.launching = True
        ticks[0] = 0
        portion = backend.launch(
            backend.prepare(texts()[first:] + texts()[:first]), Rows(matrix, flags, places), tick
        )
        device.launching = False
        assert ticks[0] == 0, "a pass that is only queued is no progress"
        return portion.finish, places, np.roll(expected, -first, axis=0)

    under_way = launch(0, in_a_row)
    for first, places in ((3, mixed), (5, in_a_row), (7, mixed)):
        following = launch(first, places)
        finish, earlier, own = under_way
        matrix[earlier] = np.nan
        assert finish().tokens > 0
        assert ticks[0] > 1, "progress is told for each pass"
        assert parity.lowest_cosine(matrix[earlier], own) > 0.999999
        under_way = following
    under_way[0]()
    untouched = np.setdiff1d(np.arange(len(matrix)), [in_a_row, mixed])
    assert np.all(matrix[untouched] == 7)
    assert flags.any()


def test_pooling_sums_the_tokens_of_each_text_in_order() -> None:
    import torch

    from surge_dagster.engine.inference.packed_backend import pooled

    values = torch.tensor([[1e8], [1.0], [-1e8], [2.0], [3.0], [5.0]])
    borders = torch.tensor([0, 3, 5, 6])
    positions = torch.tensor([0, 1, 2, 0, 1, 0])

    found = pooled("mean", values, borders, positions, prompt_length=0)

    # 1e8 + 1 is 1e8 in fp32, so any other order gives the first text another mean
    assert found.ravel().tolist() == [0, 2.5, 5]


@pytest.mark.parametrize(
    ("compiler", "name"),
    [
        pytest.param("eager", "bert_cls", marks=pytest.mark.processes),
        pytest.param("inductor", "distilbert_mean", marks=[pytest.mark.soak, COMPILES]),
    ],
)
def test_layers_are_compiled_once_for_all_lengths(
    compiler: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from surge_dagster.engine.inference.packed_backend import PackedBackend
    from tests.engine.encoder import tiny_models

    # More than the graphs that torch compiles of one function before it gives up.
    monkeypatch.setitem(tiny_models._ENCODER, "num_hidden_layers", 12)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    embed = PackedBackend._embed
    passes = list[int]()

    def counted(self: PackedBackend, *arguments: Any) -> Any:
        passes.append(arguments[-1].tokens)
        return embed(self, *arguments)

    monkeypatch.setattr(PackedBackend, "_embed", counted)
    backend, space, expected = _loaded(tiny_model(name, tmp_path), is_compiled=True)
    assert backend.detail.endswith("packed and compiled")
    assert min(passes[2:]) > 120, "kernels are chosen by whole passes of 200 tokens"
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled <= 3, "embeddings, layers of texts in cells, and those of longer texts"
    rng = np.random.default_rng(3)
    for number in range(50):
        drawn = ["steel " * int(n) for n in rng.integers(0, 60, int(rng.integers(1, 30)))] + [
            "oak " * (5 * number)
        ]
        encode_texts(backend, drawn, space)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    found, _ = encode_texts(backend, texts(), space)
    assert parity.lowest_cosine(found, expected) > 0.999999


def test_portions_are_answered_in_order_and_only_bad_groups_fail(
    faulty_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a backend that launches a portion before the one before has ended, and fails when it
    waits for it."""
    monkeypatch.setattr(schedule, "QUEUED_PORTIONS", replace(schedule.QUEUED_PORTIONS, texts=5))
    good = [f"text {number}" for number in range(40)]
    bad = {7: "fail always", 23: "die always", 24: "fail always"}
    mixed = [bad.get(row, text) for row, text in enumerate(good)]
    settings: Any = {"devices": ["cpu", "cpu"], "max_respawns": 50}
    with (
        EncoderPool(EncodingSpec("hash://16"), backend="faults:QueuingBackend", **settings) as pool,
        filled_slot(pool, good) as slot,
    ):
        pool.encode(slot)
        expected = slot.matrix(0, len(good)).copy()
        with filled_slot(pool, mixed) as other:
            call = pool.submit(other)
            metrics = call.result()
            assert metrics is not None
            assert sorted(failed.row for failed in metrics.failed) == sorted(bad)
            kept = np.setdiff1d(np.arange(len(good)), list(bad))
            assert np.array_equal(other.matrix(0, len(good))[kept], expected[kept])


def test_layers_that_do_not_compile_are_computed_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fail)
    backend, space, expected = _loaded(tiny_model("distilbert_mean", tmp_path), is_compiled=True)
    assert backend.detail.endswith("packed")
    found, _ = encode_texts(backend, texts(), space)
    assert parity.lowest_cosine(found, expected) > 0.999999


def test_layers_are_compiled_even_if_embeddings_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

    compiled: list[Any] = []

    def compile_layers(function: Any, dynamic: bool) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            if function is BertEmbeddings.forward:
                raise RuntimeError("no kernel for this table")
            compiled.append(function)
            return function(*arguments, **options)

        return counted

    monkeypatch.setattr(torch, "compile", compile_layers)
    backend, space, expected = _loaded(tiny_model("bert_cls", tmp_path), is_compiled=True)
    compiled.clear()
    found, _ = encode_texts(backend, texts(), space)

    assert backend.detail.endswith("packed and compiled")
    assert set(compiled) == {BertLayer.forward}
    assert parity.lowest_cosine(found, expected) > 0.999999
