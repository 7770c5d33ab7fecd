"""OpenvinoBackend, for the CPU: the fp32 vectors of torch at a multiple of its speed, and a start
without torch.

OpenVINO chooses bf16 by itself where the CPU has it, so the precision is set. Several streams share
one process: two processes would hold two models and, with OpenVINO's own pinning, the same cores.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator

from surge_dagster.engine.encoder.worker.backends.base import BackendSettings, Rows
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, Tokens
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.inference.converted_models import converted_model, converted_tokenizer
from surge_dagster.engine.inference.passes import TokenBatch
from surge_dagster.engine.inference.quiet_openvino import ov
from surge_dagster.engine.inference.token_backend import PaddedBackend, RunPass
from surge_dagster.engine.model.spec import Space

# The first conversion sets up numpy within OpenVINO's bindings and releases the GIL in between.
# When two streams were the first ones at the same time, both waited for ever.
ov.Type.f32.to_dtype()

_TOKEN_BUDGET = 1_024
# The fixed cost of a pass is small, but every new shape costs about as much as this many tokens.
_PASS_TOKENS = 48
_HINTS = {"fp32": "f32", "bf16": "bf16"}


class OpenvinoBackend(PaddedBackend):
    name = "openvino"
    budget_candidates = (512, 1_024, 2_048)

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        core = ov.Core()
        if settings.precision == "bf16" and "BF16" not in core.get_property(
            "CPU", "OPTIMIZATION_CAPABILITIES"
        ):
            raise ConfigError("this CPU has no bf16 arithmetic; use precision fp32")
        folder = converted_model(space)
        # One stream per core is fastest: no core waits for another inside a pass.
        compiled = core.compile_model(
            folder / "model.xml",
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": getattr(ov.Type, _HINTS[settings.precision]),
                "NUM_STREAMS": settings.threads,
                "INFERENCE_NUM_THREADS": settings.threads,
                "ENABLE_CPU_PINNING": False,
            },
        )
        self.detail = f"openvino {ov.get_version().split('-')[0]}, {settings.threads} streams"
        # Not OpenVINO's AsyncInferQueue: it does not say which of several passes has failed.
        self._idle: queue.SimpleQueue[ov.InferRequest] = queue.SimpleQueue()
        for _ in range(settings.threads):
            self._idle.put(compiled.create_infer_request())
        super().__init__(
            TextTokenizer(converted_tokenizer(folder), space),
            token_budget=settings.token_budget or _TOKEN_BUDGET,
            pass_tokens=_PASS_TOKENS,
            streams=settings.threads,
        )

    @contextlib.contextmanager
    def _passes(self, tokens: Tokens, rows: Rows) -> Iterator[RunPass]:
        def run_pass(batch: TokenBatch) -> None:
            request = self._idle.get()
            try:
                inputs = list(tokens.gather(batch.rows, batch.length))
                request.start_async(inputs, share_inputs=True)
                request.wait()
                rows.matrix[rows.places[batch.rows]] = request.get_output_tensor(0).data
            finally:
                self._idle.put(request)

        yield run_pass
