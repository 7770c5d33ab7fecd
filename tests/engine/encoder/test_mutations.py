"""Faults that programs of this kind have had, put into the encoder one at a time: no start accepts
any of them.

Each is put where it would arise: the tokenizer's settings, the gathering of padded batches, the
modules. The reference of the parity check stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.worker.backends import BackendSettings, Rows
from surge_dagster.engine.encoder.worker.loading import load_backend
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, TokenizerFacts
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.inference import torch_backend as ours
from surge_dagster.engine.model.spec import EncodingSpec, Space
from tests.engine.encoder.conftest import tiny_model

pytestmark = pytest.mark.timeout(400)

# The token budget that a worker begins with, so that batches are those of a start.
_SETTINGS = BackendSettings(device="cpu", precision="fp32", threads=2, token_budget=2_048)


@pytest.fixture(scope="module")
def spaces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Space]:
    made: dict[str, Space] = {}

    def space_of(name: str) -> Space:
        if name not in made:
            made[name] = EncodingSpec(
                str(tiny_model(name, tmp_path_factory.mktemp(name)))
            ).resolve()
        return made[name]

    return space_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start compares, whatever another one has found."""
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "cache"))


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, and how it is put into the encoder."""

    name: str
    inject: Callable[[pytest.MonkeyPatch], None]
    model: str = "bert_with_prompts"
    precision: str = "fp32"


def _in_space(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """The tokenizer and the modules work for another space."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        tokenizer = ours.TextTokenizer
        embedder = ours.embedder
        patch.setattr(
            ours, "TextTokenizer", lambda facts, space: tokenizer(facts, replace(space, **changes))
        )
        patch.setattr(
            ours, "embedder", lambda model, space, n: embedder(model, replace(space, **changes), n)
        )

    return inject


def _in_modules(change: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def inject(patch: pytest.MonkeyPatch) -> None:
        embedder = ours.embedder

        def changed(model: Any, space: Space, prompt_length: int | None) -> Any:
            module = embedder(model, space, prompt_length)
            change(model)
            return module

        patch.setattr(ours, "embedder", changed)

    return inject


def _in_tokenizer(change: Callable[[dict[str, Any]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def inject(patch: pytest.MonkeyPatch) -> None:
        facts_of = ours.tokenizer_facts

        def changed(model: Any, space: Space) -> TokenizerFacts:
            facts = facts_of(model, space)
            assert facts is not None
            document = json.loads(facts.tokenizer_json)
            change(document)
            return replace(facts, tokenizer_json=json.dumps(document))

        patch.setattr(ours, "tokenizer_facts", changed)

    return inject


def _in_batches(
    change: Callable[[Any, Any], tuple[Any, Any]],
) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes ids and mask of the batches that have padding."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        gather = ours.TorchBackend._gather

        def changed(self: Any, *arguments: Any) -> tuple[Any, Any]:
            ids, mask = gather(self, *arguments)
            return (ids, mask) if mask is None else change(ids, mask)

        patch.setattr(ours.TorchBackend, "_gather", changed)

    return inject


def _without(kind: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name in [
            name for name, module in model.named_children() if type(module).__name__ == kind
        ]:
            delattr(model, name)

    return change


def _features(place: int, **values: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    """Changes the features that the module at a place receives."""

    def hook(_: Any, arguments: tuple[dict[str, Any], ...]) -> None:
        arguments[0].update({name: value(arguments[0]) for name, value in values.items()})

    return lambda model: model[place].register_forward_pre_hook(hook)


def _on_the_left(ids: Any, mask: Any) -> tuple[Any, Any]:
    for row, length in enumerate(mask.sum(1).tolist()):
        ids[row] = ids[row].roll(mask.shape[1] - length)
        mask[row] = mask[row].roll(mask.shape[1] - length)
    return ids, mask


def _cut_without_special_tokens(patch: pytest.MonkeyPatch) -> None:
    class Cutting(TextTokenizer):
        def __init__(self, facts: TokenizerFacts, space: Space) -> None:
            super().__init__(facts, space)
            self._surplus = space.max_length  # the last token, whichever it is
            self._words = None

    patch.setattr(ours, "TextTokenizer", Cutting)


def _with_another_end(patch: pytest.MonkeyPatch) -> None:
    class Ending(TextTokenizer):
        def __init__(self, facts: TokenizerFacts, space: Space) -> None:
            super().__init__(facts, space)
            self._after = self._before

    patch.setattr(ours, "TextTokenizer", Ending)


def _truncated_on_the_left(patch: pytest.MonkeyPatch) -> None:
    facts_of = ours.tokenizer_facts

    def changed(model: Any, space: Space) -> TokenizerFacts:
        facts = facts_of(model, space)
        assert facts is not None
        return replace(facts, truncation_side="left")

    patch.setattr(ours, "tokenizer_facts", changed)


def _rows_in_another_order(patch: pytest.MonkeyPatch) -> None:
    forward = ours.TorchBackend.forward

    def changed(self: Any, prepared: Any, rows: Rows, progress: Any) -> Any:
        metrics = forward(self, prepared, rows, progress)
        rows.matrix[rows.places] = np.roll(rows.matrix[rows.places], 1, axis=0)
        return metrics

    patch.setattr(ours.TorchBackend, "forward", changed)


def _ones(features: dict[str, Any]) -> Any:
    import torch

    return torch.ones_like(features["input_ids"])


FAULTS = (
    Fault("prompt on the side of queries only", _in_space(document_prompt="")),
    Fault("Dense head missing", _in_modules(_without("Dense")), "xlm_roberta_with_dense"),
    Fault("padding on the other side", _in_batches(_on_the_left)),
    Fault("attention mask left out", _in_batches(lambda ids, mask: (ids, None))),
    Fault(
        "last token of the padded row",
        _in_modules(_features(1, attention_mask=_ones)),
        "qwen3_last_token",
    ),
    Fault("segment of a second text", _in_modules(_features(0, token_type_ids=_ones))),
    Fault("normalization too many", _in_space(normalize=True), "bert_several_poolings"),
    Fault("special tokens cut off", _cut_without_special_tokens),
    Fault("words put together with another end", _with_another_end),
    Fault("truncation at the other end", _truncated_on_the_left),
    Fault(
        "lower-casing lost",
        _in_tokenizer(lambda document: document["normalizer"].update(lowercase=False)),
    ),
    Fault("dropout left on", _in_modules(lambda model: model.train())),
    Fault("rows in another order", _rows_in_another_order),
    Fault("fp16 overflow", lambda patch: None, "gemma3_overflowing_fp16", "fp16"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_start_refuses_an_encoder_with_a_fault(
    fault: Fault, spaces: Callable[[str], Space], monkeypatch: pytest.MonkeyPatch
) -> None:
    space = spaces(fault.model)
    fault.inject(monkeypatch)
    with pytest.raises(ConfigError, match="differs from sentence-transformers"):
        load_backend(space, replace(_SETTINGS, precision=fault.precision), "torch")


@pytest.mark.parametrize("model", sorted({fault.model for fault in FAULTS}))
def test_start_accepts_the_same_encoder_without_a_fault(
    model: str, spaces: Callable[[str], Space]
) -> None:
    loaded = load_backend(spaces(model), _SETTINGS, "torch")
    assert loaded.lowest_cosine is not None and loaded.lowest_cosine >= 0.99999
