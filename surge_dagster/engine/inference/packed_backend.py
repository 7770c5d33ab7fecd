"""PackedBackend: forward passes without padding, queued so that the device never waits.

A portion's ids go to the device once. Each pass gathers its texts there, one behind the other, and
leaves their vectors in one matrix, which is copied to a buffer of the host when the last pass has
ended. `launch` only queues this work, and what it returns waits for it: a worker launches the next
portion before it waits for the one before, and while the device computes that portion it puts the
vectors of this one into their rows.

A model that this does not suit is refused with a ConfigError, and its texts are padded
(`TorchBackend`). Whether the vectors are those of sentence-transformers is measured for each model
at a first start, as with every backend.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import (
    BackendSettings,
    LaunchedPortion,
    Progress,
    Rows,
    encode_texts,
)
from surge_dagster.engine.encoder.worker.parity import reference_vectors
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, TokenizerFacts, Tokens
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.inference.device import Device, Mark, open_device
from surge_dagster.engine.inference.joined_products import join_products
from surge_dagster.engine.inference.packed_attention import PACKED_ATTENTION, has_varlen_attention
from surge_dagster.engine.inference.packing import (
    CELL,
    LONGEST_IN_CELLS,
    Pack,
    PassShape,
    pack_texts,
)
from surge_dagster.engine.inference.token_backend import RunPass, TokenBackend
from surge_dagster.engine.inference.torch_backend import load_model, tokenizer_facts
from surge_dagster.engine.model.spec import Space

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

log = logging.getLogger(__name__)

_TOKEN_BUDGET = 65_536
_BUDGETS = (65_536, 131_072, 262_144)
POOLING_MODES = ("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")
_FEATURES = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "apart"})


@dataclass(frozen=True, slots=True)
class PackedOptions:
    """How passes are computed; benchmarks compare them.

    Attributes:
        is_compiled: fuse the kernels of the model's layers, which are compiled once for all
            lengths. Where that fails they are computed as they are.
        has_compiled_embeddings: fuse those of its embeddings, too.
        has_joined_products: compute query, key and value in one product.
    """

    is_compiled: bool = True
    has_compiled_embeddings: bool = True
    has_joined_products: bool = True


def load_packed(
    space: Space, settings: BackendSettings, options: PackedOptions = PackedOptions()
) -> PackedBackend:
    """Raises ConfigError for a model whose texts cannot be packed."""
    if settings.device != "cpu" and not has_varlen_attention():
        raise ConfigError(f"packed passes need a newer torch than {torch.__version__}")
    device = open_device(settings.device)
    model = load_model(space, settings)
    facts = tokenizer_facts(model, space)
    if facts is None:
        raise ConfigError("packed passes need a model with plain tokens")
    if settings.device == "cpu":
        options = replace(options, is_compiled=False)
    return PackedBackend(space, settings, model, facts, device, options)


class PackedBackend(TokenBackend):
    """Computes vectors in packed passes."""

    name = "packed"

    def __init__(
        self,
        space: Space,
        settings: BackendSettings,
        model: SentenceTransformer,
        facts: TokenizerFacts,
        device: Device,
        options: PackedOptions,
    ) -> None:
        self._space = space
        self._model = model
        self._device = device
        # What the model gives for no token at all: such a text has no place in a pass.
        self._of_empty_text = device.upload(reference_vectors(model, space, ["", "a"])[0])
        self._position_offset = _use_packed_attention(model)
        if options.has_joined_products:
            join_products(model)
            device.free_memory()
        self._prompt_length = facts.prompt_length or 0
        self._pad_id = facts.pad_id
        self._queued: deque[Mark] = deque()  # behind each pass and each portion
        self.machine = device.name
        self.budget_candidates = _BUDGETS
        super().__init__(
            TextTokenizer(facts, space),
            token_budget=settings.token_budget or _TOKEN_BUDGET,
            free_memory=device.free_memory,
        )
        self._dtype = next(model.parameters()).dtype
        self._has_cells = True
        fused = self._set_up(options)
        self.detail = f"torch {torch.__version__}, packed{' and compiled' if fused else ''}"

    def _set_up(self, options: PackedOptions) -> bool:
        """Run first passes and compile them; return whether layers are compiled."""
        try:
            self._run_trial_passes()
        except NotImplementedError:
            self._has_cells = False
        return options.is_compiled and self._compile(options.has_compiled_embeddings)

    def forward(self, prepared: Tokens, rows: Rows, progress: Progress) -> Costs:
        return self.launch(prepared, rows, progress).finish()

    def launch(self, prepared: Tokens, rows: Rows, progress: Progress) -> LaunchedPortion:
        """Queue the passes of a portion."""
        rows.truncated[rows.places] = prepared.truncated
        lengths = prepared.lengths
        with torch.inference_mode():
            begun = self._device.mark()
            kind = torch.from_numpy(rows.matrix).dtype
            shape = (len(lengths), rows.matrix.shape[1])
            vectors = torch.empty(shape, dtype=kind, device=self._device.torch_device)
            if not lengths.all():
                empty = self._device.upload(np.flatnonzero(lengths == 0))
                vectors[empty] = self._of_empty_text.to(kind)
            packs = pack_texts(lengths, self.token_budget, cells=self._has_cells)
            run_pass = self._pass_of(prepared, vectors)
            work = self._compute(packs, run_pass, lambda: self._report_ended(progress))
            landing = self._device.landing(vectors)
            landing.copy_(vectors, non_blocking=True)
            ended = self._device.mark()
            self._queued.append(ended)

        def finish() -> Costs:
            while not ended.is_reached:
                self._queued[0].wait()
                self._report_ended(progress)
            started = time.perf_counter()
            _put(landing, rows)
            return Costs(
                tokens=len(prepared.ids),
                padded_tokens=work.padded_tokens,
                forward_seconds=ended.seconds_since(begun) + time.perf_counter() - started,
            )

        return LaunchedPortion(is_done=lambda: ended.is_reached, finish=finish)

    def _report_ended(self, progress: Progress) -> None:
        """Report passes that have ended, those of the portion before among them."""
        while self._queued and self._queued[0].is_reached:
            self._queued.popleft()
            progress()

    def _pass_of(self, tokens: Tokens, vectors: torch.Tensor) -> RunPass:
        """Bring a portion's ids to the device; return what queues a pass and a mark behind it."""
        upload = self._device.upload
        ids = upload(np.append(tokens.ids, np.int32(self._pad_id)))

        def run_pass(pack: Pack) -> None:
            found = self._vectors_of(pack, tokens, ids)[upload(pack.places)]
            if self._space.normalize:
                found = torch.nn.functional.normalize(found, p=2.0, dim=-1)
            vectors.index_copy_(0, upload(pack.rows), found.to(vectors.dtype))
            self._queued.append(self._device.mark())

        return run_pass

    def _vectors_of(self, pack: Pack, tokens: Tokens, ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [sequences of the pack, dimension]; `ids` are those on the device."""
        starts = np.where(pack.sequences < 0, len(tokens.ids), tokens.offsets[pack.sequences])
        upload = self._device.upload
        return self._embed(ids, upload(starts), upload(pack.lengths), pack.shape)

    def _embed(
        self, ids: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, shape: PassShape
    ) -> torch.Tensor:
        """Return float32 [sequences, dimension]; padding consists of the last of `ids`."""
        borders = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=ids.device)
        torch.cumsum(lengths, 0, out=borders[1:])
        numbers = torch.arange(len(lengths), device=ids.device)
        sequences = torch.repeat_interleave(numbers, lengths, output_size=shape.tokens)
        in_text = torch.arange(shape.tokens, device=ids.device) - borders[sequences]
        places = (starts[sequences] + in_text).clamp_(max=len(ids) - 1)
        # Padding may be longer than what the model has positions for.
        in_text *= places < len(ids) - 1
        tokens = ids[places].long()
        features: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": self._positions(tokens, in_text, borders, sequences)[None],
            "cu_seq_lens_q": borders,
            "cu_seq_lens_k": borders,
            "max_length_q": shape.longest,
            "max_length_k": shape.longest,
        }
        if shape.in_cells:
            features["apart"] = self._apart(sequences.view(-1, 1, CELL))
        transformer, *others = self._model
        features = transformer(features)
        for module in others:
            if type(module).__name__ == "Pooling":
                features = self._pooled(features, borders, in_text, module)
            else:
                features = module(features)
        return features["sentence_embedding"][:, : self._space.dimension].float()

    def _positions(
        self,
        tokens: torch.Tensor,
        in_text: torch.Tensor,
        borders: torch.Tensor,
        sequences: torch.Tensor,
    ) -> torch.Tensor:
        """Return the position of each token, as the model counts them."""
        if not self._position_offset:
            return in_text
        # RoBERTa's kind counts the tokens of a text that are not its padding token, which may stand
        # in a text.
        is_counted = tokens != self._position_offset - 1
        counted = torch.cumsum(is_counted, 0)
        before = (counted - is_counted.long())[borders[:-1]]
        return (counted - before[sequences]) * is_counted + self._position_offset - 1

    def _apart(self, cells: torch.Tensor) -> torch.Tensor:
        """Return the mask that keeps the texts of a cell apart, [cells, 1, CELL, CELL]."""
        shape = (len(cells), 1, CELL, CELL)
        mask = torch.zeros(shape, dtype=self._dtype, device=cells.device)
        return mask.masked_fill_(cells[..., None] != cells[:, :, None], -torch.inf)

    def _pooled(
        self, features: dict[str, Any], borders: torch.Tensor, positions: torch.Tensor, module: Any
    ) -> dict[str, Any]:
        prompt_length = 0 if module.include_prompt else self._prompt_length
        embeddings = features["token_embeddings"][0]
        vectors = [
            pooled(mode, embeddings, borders.long(), positions, prompt_length)
            for mode in _modes_of(module)
        ]
        return features | {"sentence_embedding": torch.cat(vectors, dim=-1)}

    def _run_trial_passes(self, tokens: int = 1) -> None:
        """Run passes of about so many tokens of either kind: texts in cells, and longer ones."""
        longer = "a " * (2 * LONGEST_IN_CELLS)
        texts = ["a"] * tokens + [longer] * max(1, tokens // CELL)
        encode_texts(self, texts, self._space)

    def _compile(self, has_embeddings: bool) -> bool:
        """Compile the model's layers, all of one kind, into one function, and its embeddings into
        another; return whether at least the layers could be compiled."""
        modules = self._model.modules()
        lists = [module for module in modules if isinstance(module, torch.nn.ModuleList)]
        layers = list(max(lists, key=len, default=[]))
        if len({type(layer) for layer in layers}) != 1:
            return False
        first: Any = self._model[0]
        embeddings = getattr(first.model, "embeddings", None)  # decoders have only a table
        if has_embeddings and isinstance(embeddings, torch.nn.Module):
            # The layers gain most, and are worth a second attempt.
            return self._compile_modules([*layers, embeddings]) or self._compile_modules(layers)
        return self._compile_modules(layers)

    def _compile_modules(self, modules: list[torch.nn.Module]) -> bool:
        """Compile one function for each kind of module; return whether it works."""
        kinds = {type(module) for module in modules}
        compiled = {kind: torch.compile(kind.forward, dynamic=True) for kind in kinds}
        for module in modules:
            module.forward = compiled[type(module)].__get__(module)
        try:
            # A whole pass: the compiler takes those variants of its kernels that are fastest the
            # first time.
            self._run_trial_passes(self.token_budget)
        except Exception as error:  # a compiler, its cache or its tools: each has its own error
            log.warning("%d modules are not compiled: %s", len(modules), error)
            for module in modules:
                del module.forward
            return False
        return True


def _put(landing: torch.Tensor, rows: Rows) -> None:
    if (np.diff(rows.places) == 1).all():
        torch.from_numpy(rows.matrix[rows.places[0] : rows.places[-1] + 1]).copy_(landing)
    else:
        torch.from_numpy(rows.matrix).index_copy_(0, torch.from_numpy(rows.places), landing)


def _use_packed_attention(model: SentenceTransformer) -> int:
    """Let the model attend within each text of a pass; return the position of a first token."""
    first: Any = model[0]
    module = first.model
    reason = None
    if not getattr(module, "is_backend_compatible", lambda: False)():
        reason = "its attention cannot be exchanged"
    elif (
        first.transformer_task != "feature-extraction"
        or first.modality_config["text"]["method"] != "forward"
    ):
        reason = "it is more than an encoder"
    elif not any(_can_pool(part) for part in model):
        reason = "its pooling needs a mask"
    if reason is not None:
        raise ConfigError(f"texts of this model are padded, because {reason}")
    module.set_attn_implementation(PACKED_ATTENTION)
    if first.model_forward_params is not None:
        first.model_forward_params |= _FEATURES
    return _first_position(module)


def pooled(
    mode: str,
    embeddings: torch.Tensor,
    borders: torch.Tensor,
    positions: torch.Tensor,
    prompt_length: int,
) -> torch.Tensor:
    """Pool texts that lie one behind the other, as sentence-transformers pools padded ones.

    Sums of a text are made in the order of its tokens. Nothing waits for the device.

    Args:
        embeddings: of all tokens, [tokens, dimension].
        borders: the first token of each text and the number of tokens, int64 [texts + 1].
        positions: of each token in its text, [tokens].
        prompt_length: first tokens of each text that do not count.
    """

    def reduced(values: torch.Tensor, kind: str = "sum", nothing: float = 0.0) -> torch.Tensor:
        if prompt_length:
            values = values.masked_fill((positions < prompt_length)[:, None], nothing)
        return torch.segment_reduce(
            values, kind, offsets=borders, axis=0, initial=nothing, unsafe=True
        )

    lengths = borders.diff()
    if mode == "cls":
        has_more = lengths > prompt_length
        return embeddings[borders[:-1] + has_more * prompt_length]
    if mode == "lasttoken":
        return embeddings[borders[1:] - 1]
    if mode == "max":
        return reduced(embeddings, "max", -torch.inf)
    if mode == "weightedmean":
        weights = (positions + 1).float()[:, None]
        weighted = reduced(embeddings * weights)
        return (weighted / reduced(weights).clamp(min=1e-9)).to(embeddings.dtype)
    counts = (lengths - prompt_length).clamp(min=1e-9)[:, None].float()
    divisor = counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts
    return (reduced(embeddings.float()) / divisor).to(embeddings.dtype)


def _modes_of(pooling: Any) -> tuple[str, ...]:
    """Return the modes of a sentence-transformers' `Pooling`, whose vectors are concatenated."""
    mode = pooling.pooling_mode
    return (mode,) if isinstance(mode, str) else tuple(mode)


def _can_pool(part: Any) -> bool:
    return type(part).__name__ == "Pooling" and set(_modes_of(part)) <= set(POOLING_MODES)


def _first_position(module: torch.nn.Module) -> int:
    """Return the position of a text's first token: behind that of padding in RoBERTa's kind."""
    for part in module.modules():
        padding: Any = getattr(part, "padding_idx", None)
        positions = getattr(part, "position_embeddings", None)
        if isinstance(padding, int) and isinstance(positions, torch.nn.Embedding):
            return padding + 1
    return 0
