"""TorchBackend, for GPUs and, where OpenVINO is not installed, for the CPU.

Batches of equal token length go through the whole sentence-transformers module, without an
attention mask where they need none. The flat token ids of a chunk are copied to the device once;
each pass gathers its own [rows, length] there. The vectors are copied to their rows at the end.

On a GPU passes are only queued. The loop stays two passes ahead of the device, which keeps it busy,
and no further, so that reported progress is finished work.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from surge_dagster.engine.encoder.worker.backends.base import Backend, BackendSettings, Rows
from surge_dagster.engine.encoder.worker.sentence_model import load_reference
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, TokenizerFacts, Tokens
from surge_dagster.engine.inference.model_parts import embedder, tokenizer_facts
from surge_dagster.engine.inference.passes import TokenBatch, longest_first
from surge_dagster.engine.inference.reference_backend import ReferenceBackend
from surge_dagster.engine.inference.token_backend import PaddedBackend, RunPass
from surge_dagster.engine.model.spec import Space

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

    from surge_dagster.engine.inference.device import Device, Mark

_CPU_TOKEN_BUDGET = 2_048
_CUDA_TOKEN_BUDGET = 32_768
# The cost of launching the kernels of one pass, in tokens that could be computed in that time.
_CPU_PASS_TOKENS = 16
_CUDA_PASS_TOKENS = 1_024
_PASSES_AHEAD = 2
_PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def load_torch(space: Space, settings: BackendSettings) -> Backend:
    """A `ReferenceBackend` for models without plain tokens."""
    import torch

    from surge_dagster.engine.inference.device import open_device

    model = load_model(space, settings)
    facts = tokenizer_facts(model, space)
    if facts is None:
        return ReferenceBackend(space, model, f"torch {torch.__version__}")
    return TorchBackend(space, settings, model, facts, open_device(settings.device))


def load_model(space: Space, settings: BackendSettings) -> SentenceTransformer:
    """On the device and in the precision of the settings, at no more bytes a parameter there than
    that takes."""
    import torch

    if settings.device == "cpu":
        torch.set_num_threads(settings.threads)
    else:
        torch.cuda.set_device(settings.device)
        torch.backends.cuda.matmul.allow_tf32 = settings.precision != "fp32"
        # cuDNN attention, which torch prefers on Hopper, makes a plan for each number of rows and
        # length and keeps it.
        torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = getattr(torch, _PRECISIONS[settings.precision])
    return load_reference(space, "cpu").to(device=settings.device, dtype=dtype)


class TorchBackend(PaddedBackend):
    name = "torch"

    def __init__(
        self,
        space: Space,
        settings: BackendSettings,
        reference: SentenceTransformer,
        facts: TokenizerFacts,
        device: Device,
    ) -> None:
        import torch

        self._torch = torch
        self._device = device
        self.detail = f"torch {torch.__version__}"
        if device.queues:
            self.machine = device.name
            self.budget_candidates = (16_384, 65_536, 262_144)
        else:
            self.budget_candidates = (512, 1_024, 2_048)
        self._embed = embedder(reference, space, facts.prompt_length)
        self._pad_id = facts.pad_id
        self._columns = torch.arange(space.max_length, device=device.torch_device)
        super().__init__(
            TextTokenizer(facts, space),
            token_budget=settings.token_budget
            or (_CUDA_TOKEN_BUDGET if device.queues else _CPU_TOKEN_BUDGET),
            pass_tokens=_CUDA_PASS_TOKENS if device.queues else _CPU_PASS_TOKENS,
            free_memory=device.free_memory,
        )

    @contextlib.contextmanager
    def _passes(self, tokens: Tokens, rows: Rows) -> Iterator[RunPass]:
        torch = self._torch
        device = self._device
        order = longest_first(tokens.lengths)
        target = torch.from_numpy(rows.matrix)
        under_way: deque[Mark] = deque()

        with torch.inference_mode():
            # ids of no text at all are those of padding
            ids = device.upload(np.append(tokens.ids, np.int32(self._pad_id)))
            starts = device.upload(tokens.offsets[order])
            lengths = device.upload(tokens.lengths[order])
            places = device.upload(order)
            results = torch.empty(
                (len(order), target.shape[1]), dtype=target.dtype, device=device.torch_device
            )

            def run_pass(batch: TokenBatch) -> None:
                part = slice(batch.first, batch.first + len(batch.rows))
                vectors = self._embed(*self._gather(ids, starts[part], lengths[part], batch))
                results.index_copy_(0, places[part], vectors.to(results.dtype))
                under_way.append(device.mark())
                if len(under_way) > _PASSES_AHEAD:
                    under_way.popleft().wait()

            yield run_pass
            self._download(results, target, torch.from_numpy(rows.places))

    def _gather(
        self, ids: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, batch: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[rows, length] ids on the device and, where rows are padded, their attention mask."""
        columns = self._columns[: batch.length]
        places = starts[:, None] + columns
        if batch.exact:
            return ids[places].long(), None
        mask = columns < lengths[:, None]
        gathered = ids[places.masked_fill_(~mask, 0)].long()
        return gathered.masked_fill_(~mask, self._pad_id), mask.long()

    def _download(self, results: torch.Tensor, target: torch.Tensor, places: torch.Tensor) -> None:
        """Copies a chunk's vectors to their rows, through pinned memory: other copies are several
        times slower.

        The rows themselves are not pinned: the arena may unmap them after the chunk, and pinning
        them for one chunk costs as much as copying it.
        """
        landing = self._device.landing(results)
        landing.copy_(results, non_blocking=True)
        self._device.mark().wait()
        target.index_copy_(0, places, landing)
