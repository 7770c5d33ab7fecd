"""Texts as token ids: each text is tokenized once, when it is accepted, as the workers would.

Workers take the ids in place of the texts. Some cannot, such as those of a model without a fast
tokenizer: they get the texts, and a text counts as a token for every four bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surge_dagster.engine.encoder.pool import PoolFacts
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, TokenizerFacts
from surge_dagster.engine.model.folder import tokenizer_file
from surge_dagster.engine.model.spec import Space

_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as it waits for a pass.

    Attributes:
        content: its ids (int32), or the text in UTF-8.
        tokens: prompt and special tokens included, at least 1.
        is_truncated: whether the model does not read all of it; without a tokenizer only the
            workers know.
    """

    content: bytes
    tokens: int
    is_truncated: bool = False


class TextTokens:
    """Tokenizes texts for the workers of a space.

    Args:
        facts: of a pool of the same model.

    Attributes:
        makes_ids: whether texts become token ids.
    """

    def __init__(self, space: Space, facts: PoolFacts) -> None:
        self._space = space
        self._prompt_bytes = len(space.prompt.encode())
        self._tokenizer: TextTokenizer | None = None
        takes_ids = facts.tokenizer and facts.truncation_side
        file = tokenizer_file(Path(space.model_path)) if takes_ids else None
        if file is not None:
            own = TokenizerFacts(file.read_text("utf-8"), facts.truncation_side)
            tokenizer = TextTokenizer(own, space)
            if tokenizer.digest == facts.tokenizer.split()[0]:
                self._tokenizer = tokenizer
        self.makes_ids = self._tokenizer is not None

    def __call__(self, texts: list[str]) -> list[TokenizedText]:
        tokenized = list[TokenizedText]()
        if self._tokenizer is None:
            for text in texts:
                content = text.encode()
                tokens = 1 + (self._prompt_bytes + len(content)) // _BYTES_PER_TOKEN
                is_truncated = self._space.is_hash and tokens > self._space.max_length
                tokenized.append(TokenizedText(content, tokens, is_truncated))
            return tokenized

        found = self._tokenizer.encode(texts)
        for row, is_truncated in enumerate(found.truncated.tolist()):
            ids = found.ids[found.offsets[row] : found.offsets[row + 1]]
            tokenized.append(TokenizedText(ids.tobytes(), max(1, len(ids)), is_truncated))
        return tokenized
