"""torch, on a GPU or, where nothing faster is installed, on the CPU.

Batches of equal token length go through the whole sentence-transformers module, without an attention mask where they
need none. On a GPU,
ids are copied from pinned memory while the pass before still computes, arithmetic is fp16 or bf16 (fp32 accumulates
where the kernels do), and results come back once per chunk. A pass that does not fit the device's memory halves the
token budget for the rest of the worker's life and is done again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from surge_dagster.engine.encoder.backends.base import BackendSettings, ChunkFigures, Progress
from surge_dagster.engine.encoder.sentence_model import embedder, load_reference, reference_vectors, tokenizer_facts
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.encoder.token_batches import TokenBatch, plan_batches
from surge_dagster.engine.encoder.tokenization import TextTokenizer, Tokens

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_CPU_TOKEN_BUDGET = 2_048
_CUDA_TOKEN_BUDGET = 32_768
# What launching the kernels of one pass costs, in tokens that could have been computed meanwhile.
_CPU_PASS_TOKENS = 16
_CUDA_PASS_TOKENS = 1_024
_PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class _Prepared:
    texts: list[str]
    tokens: Tokens | None
    seconds: float


class TorchBackend:
    """The worker's side of a torch device."""

    name = "torch"

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        import torch

        self._torch = torch
        self._space = space
        self._device = torch.device(settings.device)
        if self._device.type == "cpu":
            torch.set_num_threads(settings.threads)
        else:
            torch.cuda.set_device(self._device)
            torch.backends.cuda.matmul.allow_tf32 = settings.precision != "fp32"
            torch.backends.cudnn.benchmark = True
        self.detail = f"torch {torch.__version__} on {settings.device}"
        self.reference = load_reference(space, settings.device)
        facts = tokenizer_facts(self.reference, space)
        self._tokenizer: TextTokenizer | None = None
        self._embedder: torch.nn.Module | None = None
        if facts is not None:
            self._tokenizer = TextTokenizer(
                facts.tokenizer_json,
                max_length=space.max_length,
                prompt=space.prompt,
                truncation_side=facts.truncation_side,
                pad_id=facts.pad_id,
            )
            self._embedder = embedder(self.reference, space, facts.prompt_length)
        if settings.precision != "fp32":
            self.reference.to(getattr(torch, _PRECISIONS[settings.precision]))
        on_cpu = self._device.type == "cpu"
        self._budget = settings.token_budget or (_CPU_TOKEN_BUDGET if on_cpu else _CUDA_TOKEN_BUDGET)
        self._pass_tokens = _CPU_PASS_TOKENS if on_cpu else _CUDA_PASS_TOKENS

    def prepare(self, texts: list[str], progress: Progress) -> _Prepared:
        started = time.perf_counter()
        tokens = self._tokenizer.encode(texts) if self._tokenizer is not None else None
        progress()
        return _Prepared(texts, tokens, time.perf_counter() - started)

    def forward(
        self, prepared: _Prepared, matrix: np.ndarray, truncated: np.ndarray, progress: Progress
    ) -> ChunkFigures:
        started = time.perf_counter()
        tokens = prepared.tokens
        if tokens is None:
            # A model without a plain tokenizer (static embeddings, chat templates): its own way is the only one.
            matrix[:] = reference_vectors(self.reference, self._space, prepared.texts)
            truncated[:] = 0
            progress()
            return ChunkFigures(0, 0, 0, prepared.seconds, time.perf_counter() - started)
        truncated[:] = tokens.truncated
        pending: list[tuple[TokenBatch, torch.Tensor]] = []
        with self._torch.inference_mode():
            batches = plan_batches(tokens.lengths, self._budget, self._pass_tokens)
            for batch in batches:
                for part, vectors in self._run(batch, tokens):
                    if self._device.type == "cpu":
                        matrix[part.rows] = vectors.numpy()
                    else:
                        pending.append((part, vectors))
                progress()
            for part, vectors in pending:
                matrix[part.rows] = vectors.float().cpu().numpy()
                progress()
        return ChunkFigures(
            tokens=len(tokens.ids),
            padded_tokens=sum(batch.tokens for batch in batches),
            truncated=int(np.count_nonzero(tokens.truncated)),
            tokenize_seconds=prepared.seconds,
            forward_seconds=time.perf_counter() - started,
        )

    def _run(self, batch: TokenBatch, tokens: Tokens) -> list[tuple[TokenBatch, torch.Tensor]]:
        """One forward pass, in halves where the device's memory does not hold it."""
        assert self._embedder is not None
        if batch.tokens > self._budget and len(batch.rows) > 1:
            return self._in_halves(batch, tokens)
        try:
            ids, mask = (self._to_device(array) for array in tokens.gather(batch.rows, batch.length))
            return [(batch, self._embedder(ids, None if batch.exact else mask))]
        except self._torch.cuda.OutOfMemoryError:
            if len(batch.rows) == 1:
                raise
        # Outside of the handler: the exception holds on to the tensors that are in the way.
        self._torch.cuda.empty_cache()
        self._budget = max(batch.length, batch.tokens // 2)
        log.warning("out of memory on %s; the token budget is %d from now on", self._device, self._budget)
        return self._in_halves(batch, tokens)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = self._torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor

    def _in_halves(self, batch: TokenBatch, tokens: Tokens) -> list[tuple[TokenBatch, torch.Tensor]]:
        half = len(batch.rows) // 2
        first = TokenBatch(batch.rows[:half], batch.length, batch.exact)
        second = TokenBatch(batch.rows[half:], batch.length, batch.exact)
        return self._run(first, tokens) + self._run(second, tokens)
