"""The machine's own limit: multiplying matrices of the model's shapes with the library that encodes.

A transformer is mostly linear layers, so no encoder is faster than the machine multiplies such matrices. The limit is
measured before and after the rounds, and the best measurement counts. The work of a text of L tokens is

    2 · L · (parameters of the linear layers) + 4 · L² · hidden size · layers        floating-point operations

Embeddings are looked up, not multiplied, and do not count. The second term, attention's products, is 0.5 % of the work
at 11 tokens and 18 % at 512 for the demo model's shape.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from surge_dagster.engine.encoder.devices import usable_cores

_SECONDS = 1.0
_ROWS = (512, 1_024)
_GPU_ROWS = (16_384, 65_536)
_PAIRS = 6
_NOT_LINEAR = ("embeddings", "pooler")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a transformer, which decides the work per token."""

    linear_parameters: int
    hidden: int
    intermediate: int
    layers: int

    def flops(self, lengths: np.ndarray) -> float:
        """Floating-point operations for texts of these lengths in tokens."""
        exact = lengths.astype(np.float64)
        attention = 4.0 * self.hidden * self.layers * float((exact**2).sum())
        return 2.0 * self.linear_parameters * float(exact.sum()) + attention


def read_shape(model_path: str) -> ModelShape:
    """The shape of the model in a folder, from its config and the headers of its weights."""
    folder = Path(model_path)
    config = json.loads((folder / "config.json").read_text())
    parameters = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                shape = weights.get_slice(name).get_shape()
                if len(shape) == 2 and not any(part in name for part in _NOT_LINEAR):
                    parameters += shape[0] * shape[1]
    return ModelShape(
        linear_parameters=parameters,
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
    )


class MatmulLimit:
    """Floating-point operations per second of the feed-forward layers' products, the best of all measurements.

    Args:
        backend: "openvino", or anything else for torch.
        device: "cpu" or "cuda:N".
        precision: "fp32", "fp16" or "bf16".
    """

    def __init__(self, backend: str, device: str, precision: str, shape: ModelShape) -> None:
        self.library = "openvino" if backend == "openvino" else "torch"
        self.flops_per_second = 0.0
        self._runs: list[tuple[float, Callable[[], None]]] = []
        for rows in _ROWS if device == "cpu" else _GPU_ROWS:
            if self.library == "openvino":
                run, passes = _openvino_products(shape, rows, precision)
            else:
                run, passes = _torch_products(shape, rows, precision, device), 1
            self._runs.append((passes * 2.0 * 2 * _PAIRS * rows * shape.hidden * shape.intermediate, run))
            run()

    def measure(self, seconds: float = _SECONDS) -> None:
        """Measure again and keep the best rate."""
        for flops, run in self._runs:
            ended = time.perf_counter() + seconds
            while (begun := time.perf_counter()) < ended:
                run()
                self.flops_per_second = max(self.flops_per_second, flops / (time.perf_counter() - begun))


def _openvino_products(shape: ModelShape, rows: int, precision: str) -> tuple[Callable[[], None], int]:
    """A chain of products with the streams and threads of the pool's worker, and how many times a call runs it."""
    import openvino as ov
    from openvino import opset13 as ops

    random = np.random.default_rng(0)
    entry = ops.parameter([rows, shape.hidden], np.float32)
    node = entry
    for size in _PAIRS * ((shape.hidden, shape.intermediate), (shape.intermediate, shape.hidden)):
        # Scaled so that values keep their magnitude through the chain.
        weights = (random.standard_normal(size) / size[0] ** 0.5).astype(np.float32)
        node = ops.matmul(node, ops.constant(weights), False, False)
    threads = usable_cores()
    compiled = ov.Core().compile_model(
        ov.Model([node], [entry], "products"),  # pyright: ignore[reportGeneralTypeIssues]
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": ov.Type.f32 if precision == "fp32" else ov.Type.bf16,
            "NUM_STREAMS": threads,
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,
        },
    )
    queue = ov.AsyncInferQueue(compiled, threads)
    given = random.standard_normal((rows, shape.hidden)).astype(np.float32)

    def run() -> None:
        for _ in range(2 * threads):
            queue.start_async([given], share_inputs=True)
        queue.wait_all()

    return run, 2 * threads


def _torch_products(shape: ModelShape, rows: int, precision: str, device: str) -> Callable[[], None]:
    """The same chain with torch."""
    import torch

    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    sizes = _PAIRS * ((shape.hidden, shape.intermediate), (shape.intermediate, shape.hidden))
    layers = [(torch.randn(size[1], size[0]) / size[0] ** 0.5).to(device, kind) for size in sizes]
    given = torch.randn(rows, shape.hidden).to(device, kind)

    @torch.inference_mode()
    def run() -> None:
        values = given
        for weights in layers:
            values = torch.nn.functional.linear(values, weights)
        if device != "cpu":
            torch.cuda.synchronize()

    return run
