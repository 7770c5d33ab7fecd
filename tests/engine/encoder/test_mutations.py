"""Faults that programs of this kind have had, put into the encoder one at a time: no start accepts
any of them.

Each is put where it would arise: the tokenizer's settings, the gathering of padded batches, the
modules. The reference of the parity check stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
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

# Each start compares, whatever another one has found.
pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("own_cache")]

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


def _in_facts(change: Callable[[Any], TokenizerFacts]) -> Callable[[pytest.MonkeyPatch], None]:
    def inject(patch: pytest.MonkeyPatch) -> None:
        facts_of = ours.tokenizer_facts
        patch.setattr(ours, "tokenizer_facts", lambda model, space: change(facts_of(model, space)))

    return inject


def _in_tokenizer(change: Callable[[Any, Space], None]) -> Callable[[pytest.MonkeyPatch], None]:
    class Changed(TextTokenizer):
        def __init__(self, facts: TokenizerFacts, space: Space) -> None:
            super().__init__(facts, space)
            change(self, space)

    return lambda patch: patch.setattr(ours, "TextTokenizer", Changed)


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
        for name, module in list(model.named_children()):
            if type(module).__name__ == kind:
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


def _cut_without_special_tokens(tokenizer: Any, space: Space) -> None:
    tokenizer._surplus = space.max_length  # the last token, whichever it is
    tokenizer._words = None


def _with_another_end(tokenizer: Any, _: Space) -> None:
    tokenizer._after = tokenizer._before


def _truncated_on_the_left(facts: TokenizerFacts) -> TokenizerFacts:
    return replace(facts, truncation_side="left")


def _without_lower_casing(facts: TokenizerFacts) -> TokenizerFacts:
    document = json.loads(facts.tokenizer_json)
    document["normalizer"]["lowercase"] = False
    return replace(facts, tokenizer_json=json.dumps(document))


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
    Fault("special tokens cut off", _in_tokenizer(_cut_without_special_tokens)),
    Fault("words put together with another end", _in_tokenizer(_with_another_end)),
    Fault("truncation at the other end", _in_facts(_truncated_on_the_left)),
    Fault("lower-casing lost", _in_facts(_without_lower_casing)),
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
