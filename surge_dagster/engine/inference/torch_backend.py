"""TorchBackend, for GPUs and, where OpenVINO is not installed, for the CPU.

Batches of equal token length go through the whole sentence-transformers module, without an
attention mask where they need none. The vectors are copied to their rows at the end.

On a GPU passes are only queued. The loop stays two passes ahead of the device, which keeps it busy,
and no further, so that reported progress is finished work.

Models without plain rows of token ids go through sentence-transformers' own `encode`.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import Backend, BackendSettings, Progress, Rows
from surge_dagster.engine.encoder.worker.parity import load_reference, reference_vectors
from surge_dagster.engine.encoder.worker.tokenization import (
    PROBES,
    TextTokenizer,
    TokenizerFacts,
    Tokens,
    digest_of_tokens,
)
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.inference.token_backend import (
    PaddedBackend,
    RunPass,
    TokenBatch,
)
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
_TEXTS_PER_STEP = 256  # of sentence-transformers' `encode`
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

        self._device = device
        self.detail = f"torch {torch.__version__}"
        if device.queues:
            self.machine = device.name
            self.budget_candidates = (16_384, 65_536, 262_144)
            self.pass_tokens = _CUDA_PASS_TOKENS
        else:
            self.budget_candidates = (512, 1_024, 2_048)
            self.pass_tokens = _CPU_PASS_TOKENS
        self._embed = embedder(reference, space, facts.prompt_length)
        super().__init__(
            TextTokenizer(facts, space),
            token_budget=settings.token_budget
            or (_CUDA_TOKEN_BUDGET if device.queues else _CPU_TOKEN_BUDGET),
            free_memory=device.free_memory,
        )

    @contextlib.contextmanager
    def _passes(self, tokens: Tokens, rows: Rows) -> Iterator[RunPass]:
        import torch

        device = self._device
        under_way: deque[Mark] = deque()
        shape = (len(rows.places), rows.matrix.shape[1])

        with torch.inference_mode():
            results = torch.empty(shape, device=device.torch_device)

            def run_pass(batch: TokenBatch) -> None:
                vectors = self._embed(*self._gather(tokens, batch))
                results.index_copy_(0, device.upload(batch.rows), vectors)
                under_way.append(device.mark())
                if len(under_way) > _PASSES_AHEAD:
                    under_way.popleft().wait()

            yield run_pass
            # Through pinned memory: other copies are several times slower. The rows themselves are
            # not pinned: the arena may unmap them after the portion, and pinning them for one
            # portion costs as much as copying it.
            landing = device.landing(results)
            landing.copy_(results, non_blocking=True)
            device.mark().wait()
            rows.matrix[rows.places] = landing.numpy()

    def _gather(
        self, tokens: Tokens, batch: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[rows, length] ids on the device and, where rows are padded, their attention mask."""
        ids, mask = tokens.gather(batch.rows, batch.length)
        upload = self._device.upload
        return upload(ids), None if batch.exact else upload(mask)


class ReferenceBackend:
    """Computes vectors through sentence-transformers' `encode`, for models without plain rows of
    token ids.

    Examples are static embeddings, chat templates and tokenizers without a fast version. A text
    that fills the model counts as cut, because the model's preprocessing does not say which of
    these texts were longer.
    """

    name = "torch"

    def __init__(self, space: Space, reference: SentenceTransformer, detail: str) -> None:
        self._space = space
        self._reference = reference
        self.detail = f"{detail}, through sentence-transformers' encode"
        features = [reference.preprocess([text], task=space.task) for text in PROBES]
        ids = [each["input_ids"] for each in features if "input_ids" in each]
        for each in ids:
            require_known_tokens(reference, each.ravel().tolist(), space)
        self.tokens_digest = digest_of_tokens([each.tolist() for each in ids])

    def prepare(self, texts: list[str]) -> list[str]:
        return texts

    def forward(self, prepared: list[str], rows: Rows, progress: Progress) -> Costs:
        started = time.perf_counter()
        tokens = 0
        for start in range(0, len(prepared), _TEXTS_PER_STEP):
            piece = prepared[start : start + _TEXTS_PER_STEP]
            places = rows.places[start : start + len(piece)]
            lengths = self._lengths(piece)
            rows.truncated[places] = lengths >= self._space.max_length
            tokens += int(lengths.sum())
            rows.matrix[places] = reference_vectors(self._reference, self._space, piece)
            progress()
        return Costs(
            tokens=tokens, padded_tokens=tokens, forward_seconds=time.perf_counter() - started
        )

    def _lengths(self, texts: list[str]) -> np.ndarray:
        """Tokens that the model reads of each text; zeros for a model without a limit."""
        features = self._reference.preprocess(
            texts, prompt=self._space.prompt or None, task=self._space.task
        )
        mask = features.get("attention_mask")
        if mask is None:
            return np.zeros(len(texts), np.int64)
        return mask.sum(1).cpu().numpy()


def tokenizer_facts(model: SentenceTransformer, space: Space) -> TokenizerFacts | None:
    """None where texts do not go through a plain fast tokenizer."""
    first = model[0]
    tokenizer = getattr(first, "tokenizer", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    modality_config = getattr(first, "modality_config", {"text": {}})
    if type(first).__name__ != "Transformer" or backend is None or "message" in modality_config:
        return None
    for text in PROBES:
        require_known_tokens(model, backend.encode(text).ids, space)
    # The serialized tokenizer does not keep this setting.
    if getattr(tokenizer, "split_special_tokens", False):
        return None
    features = model.preprocess(["a probe"])
    type_ids = features.get("token_type_ids")
    if type_ids is not None and bool(type_ids.any()):
        return None
    prompt_length = None
    if space.prompt:
        counted = model.preprocess(["a probe"], prompt=space.prompt).get("prompt_length")
        prompt_length = None if counted is None else int(counted)
    return TokenizerFacts(
        tokenizer_json=backend.to_str(),
        truncation_side=getattr(tokenizer, "truncation_side", "right"),
        pad_id=getattr(tokenizer, "pad_token_id", None) or 0,
        prompt_length=prompt_length,
    )


def require_known_tokens(model: SentenceTransformer, ids: Sequence[int], space: Space) -> None:
    """Raise ConfigError if a model has no embedding for one of these ids of its tokenizer.

    torch says only that an index is out of range, and on a GPU not even that.
    """
    first: Any = model[0]
    module = getattr(first, "model", None)
    if module is None:
        return
    known = len(module.get_input_embeddings().weight)
    unknown = max(ids, default=0)
    if unknown < known:
        return
    tokenizer = first.tokenizer
    raise ConfigError(
        f"the tokenizer of {space.model_path} gives token {unknown} "
        f"({tokenizer.convert_ids_to_tokens(unknown)!r}), and the model knows {known} tokens, 0 to "
        f"{known - 1}; it was loaded as {type(tokenizer).__name__}, the tokenizer_class of "
        "tokenizer_config.json. Restore that file, or the tokenizer that the model was made with"
    )


def embedder(
    model: SentenceTransformer, space: Space, prompt_length: int | None
) -> torch.nn.Module:
    """Return the whole model as one module."""
    from surge_dagster.engine.inference.embedder import Embedder

    return Embedder(model, space, prompt_length).eval()
