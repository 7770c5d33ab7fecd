"""OpenvinoBackend, for the CPU: the fp32 vectors of torch at a multiple of its speed, and a start
without torch.

The whole sentence-transformers module is converted once and stored with its tokenizer in the disk
cache. Later starts read these files and import neither torch nor sentence-transformers, which is
most of the cost of a start. They stay until somebody deletes the cache.

OpenVINO chooses bf16 by itself where the CPU has it, so the precision is set. Several streams share
one process: two processes would hold two models and, with OpenVINO's own pinning, the same cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from surge_dagster.engine.encoder.calibration import cache_key
from surge_dagster.engine.encoder.worker.backends import BackendSettings, Rows
from surge_dagster.engine.encoder.worker.tokenization import (
    TextTokenizer,
    TokenizerFacts,
    Tokens,
)
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.inference.token_backend import (
    PaddedBackend,
    RunPass,
    TokenBatch,
)
from surge_dagster.engine.model.digest import read_document
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

# `openvino_telemetry` would report each conversion to the vendor, from a process that it forks in a
# worker. OpenVINO has no setting for it and works without the package.
sys.modules["openvino_telemetry"] = None  # pyright: ignore[reportArgumentType]

import openvino as ov  # noqa: E402

# The first conversion sets up numpy within OpenVINO's bindings and releases the GIL in between.
# When two streams were the first ones at the same time, both waited for ever.
ov.Type.f32.to_dtype()

_TOKEN_BUDGET = 1_024
_HINTS = {"fp32": ov.Type.f32, "bf16": ov.Type.bf16}
_FOLDER = "openvino"
_FACTS = "tokenizer_facts.json"


class OpenvinoBackend(PaddedBackend):
    name = "openvino"
    budget_candidates = (512, 1_024, 2_048)
    # The fixed cost of a pass is small, but every new shape costs about as much as that.
    pass_tokens = 48

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        core = ov.Core()
        if settings.precision == "bf16" and "BF16" not in core.get_property(
            "CPU", "OPTIMIZATION_CAPABILITIES"
        ):
            raise ConfigError("this CPU has no bf16 arithmetic; use precision fp32")
        folder = converted_model(space)
        facts = read_document(folder / _FACTS) or {}
        # One stream per core is fastest: no core waits for another inside a pass.
        compiled = core.compile_model(
            folder / "model.xml",
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": _HINTS[settings.precision],
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
            TextTokenizer(TokenizerFacts(**facts), space),
            token_budget=settings.token_budget or _TOKEN_BUDGET,
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


def converted_model(space: Space) -> Path:
    """Return the folder of the converted fp32 model.

    Raises:
        ConfigError: the model cannot be converted, or there is no cache for it.
    """
    folder = disk_cache.place(f"{_FOLDER}/{cache_key(space.vectors_key, space.normalize)}")
    if (folder / _FACTS).is_file():
        return folder
    # Workers that start together convert once.
    with disk_cache.lock(f"{_FOLDER}/.lock") as locked:
        if not locked:
            raise ConfigError(f"{folder.parent} cannot be written; set SURGE_CACHE_DIR")
        if not (folder / _FACTS).is_file():
            _convert_into_cache(space, folder)
    return folder


def _convert_into_cache(space: Space, folder: Path) -> None:
    """Convert a model while no other process does."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as temporary:
        made = Path(temporary, "model")
        made.mkdir()
        facts = _convert(space, made)
        (made / _FACTS).write_text(json.dumps(asdict(facts)))
        for path in made.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        made.replace(folder)


def _convert(space: Space, folder: Path) -> TokenizerFacts:
    """Write a converted model, and return its tokenizer."""
    import torch

    from surge_dagster.engine.encoder.worker.parity import load_reference
    from surge_dagster.engine.inference.torch_backend import embedder, tokenizer_facts

    reference = load_reference(space, "cpu")
    facts = tokenizer_facts(reference, space)
    if facts is None:
        raise ConfigError("this model's texts do not go through a plain fast tokenizer")
    module = embedder(reference, space, facts.prompt_length)
    with torch.inference_mode():
        example = torch.arange(2 * 7).reshape(2, 7)
        # The mask hides tokens: tracing could leave out a mask of ones.
        mask = torch.ones_like(example)
        mask[0, 5:] = 0
        converted = ov.convert_model(
            module, example_input={"input_ids": example, "attention_mask": mask}
        )
    converted.reshape({place: ov.PartialShape([-1, -1]) for place in range(2)})
    try:
        ov.save_model(converted, folder / "model.xml", compress_to_fp16=False)
    except RuntimeError as error:
        # OpenVINO has no error of its own for a full disk.
        raise OSError(f"cannot write the converted model to {str(folder)!r}: {error}") from error
    return facts
