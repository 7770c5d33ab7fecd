"""One matrix product for query, key and value, which have the same input.

Models of transformers compute three products in each layer. One product with the rows of all three
weights gives the same numbers, within rounding. On a GPU it is launched once and fills the device
better: three products of a small model have a third of the blocks each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch.nn.functional import linear

# As BERT's kind, decoders and DistilBERT name them.
_NAMES = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))


def join_products(model: torch.nn.Module) -> int:
    """Replace the linear layers of query, key and value by one product; return how many times.

    The old weights are released layer by layer. Layers of other kinds, those whose inputs have
    different sizes, and those of which only some have a bias, stay as they are.
    """
    count = 0
    for module in list(model.modules()):
        for names in _NAMES:
            layers = [getattr(module, name, None) for name in names]
            if _can_be_joined(layers):
                product = _Product(layers)
                for number, name in enumerate(names):
                    module.add_module(name, _Part(product, number))
                count += 1
    return count


def _can_be_joined(layers: Sequence[object]) -> TypeGuard[list[torch.nn.Linear]]:
    inputs = set()
    has_bias = set()
    for layer in layers:
        # A subclass, a method of its own or a hook compute something else.
        if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
            return False
        if layer._forward_hooks or layer._forward_pre_hooks:
            return False
        inputs.add(layer.in_features)
        has_bias.add(layer.bias is not None)
    return len(inputs) == 1 and len(has_bias) == 1


class _Product(torch.nn.Module):
    """The product of an input, from when its first part is taken until its last part is.

    It belongs to one thread.
    """

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        super().__init__()
        weights = torch.cat([layer.weight.detach() for layer in layers])
        self.weight = torch.nn.Parameter(weights, requires_grad=False)
        self.bias = None
        if layers[0].bias is not None:
            biases = torch.cat([layer.bias.detach() for layer in layers])
            self.bias = torch.nn.Parameter(biases, requires_grad=False)
        self._sizes = [layer.out_features for layer in layers]
        self._forget()

    def _forget(self) -> None:
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._taken = 0

    def part(self, states: torch.Tensor, number: int) -> torch.Tensor:
        """Return [..., size of the part]; computes the product unless it is that of this input."""
        if states is not self._input:
            self._forget()  # before memory is needed for the new one
            self._parts = linear(states, self.weight, self.bias).split(self._sizes, dim=-1)
            self._input = states
        part = self._parts[number]
        self._taken += 1
        if self._taken == len(self._sizes):
            self._forget()
        return part


class _Part(torch.nn.Module):
    """Stands in a model for one of the layers."""

    def __init__(self, product: _Product, number: int) -> None:
        super().__init__()
        self.product = product
        self._number = number

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.product.part(states, self._number)
