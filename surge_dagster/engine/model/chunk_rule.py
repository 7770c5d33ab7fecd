"""The settings that make rows of a space chunks of documents; what cuts is `engine/chunks`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from surge_dagster.engine.errors import ConfigError

ChunkFormat = Literal["text", "markdown"]
LEAST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """How documents are cut.

    Attributes:
        tokens: of a chunk at most, with prompt and special tokens; None: what the model reads.
        overlap: tokens that a chunk repeats from the end of the one before it.
        format: "markdown" prefers to cut before headings.
        column: of a text template: only this column is cut, and each chunk repeats the rest.
        splitter: digest of what the installed splitter makes of certain texts.
        tokenizer: SHA-256 of the tokenizer.json that counts for an encoder behind HTTP.
    """

    tokens: int | None = None
    overlap: int = 0
    format: ChunkFormat = "text"
    column: str | None = None
    splitter: str = ""
    tokenizer: str = ""

    def __post_init__(self) -> None:
        for name in ("tokens", "overlap"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ConfigError(f"chunks: {name} is a number of tokens, not {value!r}")
        if self.tokens is not None and self.tokens < LEAST_TOKENS:
            raise ConfigError(f"chunks: tokens is at least {LEAST_TOKENS}, not {self.tokens}")
        if self.overlap < 0:
            raise ConfigError(f"chunks: overlap is 0 or more tokens, not {self.overlap}")
        if self.tokens is not None:
            self.require_overlap(self.tokens)
        if self.format not in get_args(ChunkFormat):
            raise ConfigError(f"chunks: format is text or markdown, not {self.format!r}")
        if self.column is not None and not (isinstance(self.column, str) and self.column):
            raise ConfigError(f"chunks: column is the name of a column, not {self.column!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return the rule as part of a space's identity."""
        values = asdict(self)
        if not self.tokenizer:
            del values["tokenizer"]
        return values

    def require_overlap(self, tokens: int) -> None:
        """Raise `ConfigError` if the overlap leaves a chunk of so many tokens no room."""
        if self.overlap > tokens - LEAST_TOKENS:
            raise ConfigError(
                f"chunks: overlap is {self.overlap} tokens of chunks of at most {tokens}; expected "
                f"at most {tokens - LEAST_TOKENS}. Lower overlap or raise tokens."
            )
