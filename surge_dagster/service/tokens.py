"""How many tokens texts have, counted before they are encoded, by the tokenizer that a pool's
workers have loaded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np

from surge_dagster.engine.encoder.speed import Speed
from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_tokens
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, TokenizerFacts, Tokens
from surge_dagster.engine.model.folder import tokenizer_file
from surge_dagster.engine.model.spec import Space

_SLICE = 64  # texts


class TokenCounter:
    """Counts tokens of texts, prompt and special tokens included, as the model reads them.

    Where the model's tokenizer cannot be used here, or gives others than the workers' one, a text
    has as many tokens per byte as the texts that were timed at the pool's first start and those of
    its runs, at most the model's length.

    Args:
        loaded: the tokenizer that workers have, as in `Space.tokenizer`; "" where unknown.
    """

    def __init__(self, space: Space, loaded: str, speed: Speed) -> None:
        self._space = space
        self._tokens_per_byte = speed.tokens_per_single_byte
        self._tokenizer = None if space.is_hash else _tokenizer(space, loaded)

    def count(
        self, texts: list[str], text_bytes: np.ndarray, is_over: Callable[[], bool] = lambda: False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each text that the model reads, int64, and whether it has more; an estimate
        never says so.

        Raises:
            CancelledError: `is_over` says that nobody waits for them any longer.
        """
        most = self._space.max_length
        if self._tokenizer is not None:
            slices = list[Tokens]()
            # so that the ids of few texts are held at a time
            for start in range(0, len(texts), _SLICE):
                if is_over():
                    raise CancelledError
                slices.append(self._tokenizer.encode(texts[start : start + _SLICE]))
            lengths, truncated = (
                [getattr(tokens, name) for tokens in slices] for name in ("lengths", "truncated")
            )
            return np.concatenate(lengths), np.concatenate(truncated)
        if self._space.is_hash:
            counted = hash_tokens(text_bytes + len(self._space.prompt.encode()))
            return np.minimum(counted, most), counted > most
        estimated = np.ceil(text_bytes * self._tokens_per_byte).astype(np.int64)
        return np.minimum(estimated, most), np.zeros(len(texts), np.bool_)


def _tokenizer(space: Space, loaded: str) -> TextTokenizer | None:
    file = tokenizer_file(Path(space.model_path))
    if file is None or not loaded:
        return None
    tokenizer = TextTokenizer(TokenizerFacts(file.read_text("utf-8")), space)
    return tokenizer if tokenizer.digest == loaded.split()[0] else None
