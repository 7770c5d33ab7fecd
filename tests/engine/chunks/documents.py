"""Documents of many kinds, and splitters of the demo model for them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from random import Random
from typing import Any

from surge_dagster.engine.chunks.splitting import Document, Splitter, splitter_digest
from surge_dagster.engine.model.chunk_rule import ChunkRule
from surge_dagster.engine.model.spec import EncodingSpec

WORDS = (
    *("steel", "bottle", "keeps", "drinks", "cold", "for", "a", "day", "don't", "3.14", "(above)"),
    *(
        "Größe",
        "naïve",
        "東京の夜景",
        "пример",
        "🚀",
        "e\u0301cole",
        "antidisestablishmentarianism",
    ),
)


@cache
def splitter(folder: Path, prompt: str = "", **rule: object) -> Splitter:
    """The splitter of a space of this model, with this prompt and rule."""
    text_format: Any = rule.get("format", "text")
    given: Any = rule
    chunks = ChunkRule(**given, splitter=splitter_digest(text_format))
    return Splitter(EncodingSpec(str(folder), document_prompt=prompt, chunks=chunks).resolve())


def sentence(random: Random) -> str:
    words = random.choices(WORDS, k=random.randint(3, 12))
    return " ".join(words).capitalize() + random.choice(".!?")


def prose(random: Random, sentences: int, between: str = " ", paragraph: int = 6) -> str:
    """Paragraphs of some sentences each."""
    parts: list[str] = []
    for number in range(1, sentences + 1):
        parts += [sentence(random), "\n\n" if number % paragraph == 0 else between]
    return "".join(parts)


def shipped_documents(count: int, most_characters: int) -> list[str]:
    """Long descriptions of installed packages, longest first, most of them Markdown."""
    described = {str(each.metadata.json.get("description", "")) for each in distributions()}
    texts = sorted(described, key=lambda text: (-len(text), text))
    return [text[:most_characters] for text in texts if text.strip()][:count]


def whole(text: str) -> Document:
    return Document(text, 0, len(text))


def cut(own: Splitter, text: str) -> list[str]:
    """The chunks of one text."""
    [chunks] = own.split([whole(text)])
    return [text[chunk.start : chunk.stop] for chunk in chunks]


def tokens(own: Splitter, text: str) -> int:
    """The tokens of a text with prompt and special tokens, counted without the splitter's code."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(own._tokenizer.to_str())
    return len(plain.encode(own._prompt + text).ids)
