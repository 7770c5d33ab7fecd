"""Query, key and value in one product: the same numbers in the same memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
_GROUPED: dict[str, Any] = _SIZES | {"num_key_value_heads": 2, "head_dim": 16}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SIZES),
    "e5": ("XLMRoberta", _SIZES | {"pad_token_id": 1}),
    "distilbert": ("DistilBert", {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4}),
    "qwen3": ("Qwen3", _GROUPED),
    "qwen3 with biases": ("Qwen3", _GROUPED | {"attention_bias": True}),
    "qwen2": ("Qwen2", _SIZES | {"num_key_value_heads": 1}),
}


def _model(kind: str, sizes: dict[str, Any]) -> Any:
    import torch
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)  # biases are zeros otherwise
    return model


def _bytes_of(model: Any) -> int:
    storages = {each.untyped_storage().data_ptr(): each for each in model.parameters()}
    return sum(each.untyped_storage().nbytes() for each in storages.values())


@pytest.mark.parametrize("name", _MODELS)
def test_joined_products_give_the_same_states(name: str) -> None:
    import torch

    from surge_dagster.engine.inference.joined_products import join_products

    model = _model(*_MODELS[name])
    ids = torch.arange(2, 40).view(2, 19)
    with torch.inference_mode():
        expected = model(input_ids=ids)[0]

        assert join_products(model) == 2
        found = model(input_ids=ids)[0]

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", _MODELS)
def test_joined_weights_take_the_place_of_the_old_ones(name: str) -> None:
    from surge_dagster.engine.inference.joined_products import join_products

    model = _model(*_MODELS[name])
    before = _bytes_of(model)
    names = ("query.weight", "q_proj.weight", "q_lin.weight")
    old = [weakref.ref(each) for key, each in model.named_parameters() if key.endswith(names)]
    assert len(old) == 2

    join_products(model)

    assert _bytes_of(model) == before
    assert [reference() for reference in old] == [None, None]


def _attention(**layers: Any) -> Any:
    import torch

    attention = torch.nn.Module()
    for name, layer in layers.items():
        attention.add_module(name, layer)
    return attention


@pytest.mark.parametrize(
    "case", ["one bias is missing", "inputs differ", "a subclass", "a method", "a hook", "no key"]
)
def test_layers_that_are_not_of_one_kind_stay(case: str) -> None:
    import torch

    from surge_dagster.engine.inference.joined_products import join_products

    class Scaled(torch.nn.Linear):
        """Computes something else than its base."""

    keys: dict[str, Any] = {
        "one bias is missing": torch.nn.Linear(8, 4, bias=False),
        "inputs differ": torch.nn.Linear(16, 4),
        "a subclass": Scaled(8, 4),
        "a method": torch.nn.Linear(8, 4),
        "a hook": torch.nn.Linear(8, 4),
        "no key": torch.nn.Identity(),
    }
    keys["a method"].forward = lambda states: 2 * states
    keys["a hook"].register_forward_hook(lambda module, inputs, output: 2 * output)
    query = torch.nn.Linear(8, 4)
    attention = _attention(query=query, key=keys[case], value=torch.nn.Linear(8, 4))

    assert join_products(attention) == 0
    assert attention.query is query


def test_parts_of_two_inputs_are_those_of_their_own_input() -> None:
    """As in attention to the states of another model."""
    import torch

    from surge_dagster.engine.inference.joined_products import join_products

    torch.manual_seed(2)
    layers = [torch.nn.Linear(8, size) for size in (4, 2, 2)]
    attention = _attention(q_proj=layers[0], k_proj=layers[1], v_proj=layers[2])
    own, other = torch.randn(2, 3, 8)
    join_products(attention)

    for _ in range(2):
        found = [attention.k_proj(other), attention.q_proj(own), attention.v_proj(other)]

        torch.testing.assert_close(found[0], layers[1](other))
        torch.testing.assert_close(found[1], layers[0](own))
        torch.testing.assert_close(found[2], layers[2](other))


def test_no_product_is_held_once_its_parts_are_taken() -> None:
    import torch

    from surge_dagster.engine.inference.joined_products import join_products

    attention = _attention(**{name: torch.nn.Linear(8, 4) for name in ("query", "key", "value")})
    join_products(attention)
    states = torch.randn(3, 8)

    parts = [getattr(attention, name)(states) for name in ("query", "key", "value")]
    product = weakref.ref(parts[0]._base)
    assert product() is not None
    parts.clear()

    assert product() is None
