"""The prompts of a model: the texts that it expects before a document and before a query.

The rule is that of sentence-transformers' `encode_document` and `encode_query`: documents take the
first of the prompts named document, passage and corpus, queries the one named query, and the
default prompt serves where none of these is stated. The library counts the names document and query
as stated, as empty prompts, where a model leaves them out, so that its passage, corpus and default
prompts are never reached. Models saved before the library had these names mean them, so here only
what the model's own configuration states counts. A model saved by a current version states all of
them, and gives what the library gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surge_dagster.engine.errors import ConfigError

Task = Literal["document", "query"]

CONFIG_FILE = "config_sentence_transformers.json"
_NAMES: dict[Task, tuple[str, ...]] = {
    "document": ("document", "passage", "corpus"),
    "query": ("query",),
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a model puts before texts."""

    document: str = ""
    query: str = ""


def stated_prompts(own: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the prompts that a model's configuration states, by name."""
    prompts = own.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise ConfigError(
            f"{folder / CONFIG_FILE}: expected prompts as texts by name, not {prompts!r}; "
            "correct it"
        )
    default = own.get("default_prompt_name")
    if default is not None and default not in (*prompts, "document", "query"):
        raise ConfigError(
            f"{folder / CONFIG_FILE}: the default prompt {default!r} is not among the prompts "
            f"({', '.join(prompts) or 'there are none'}); correct default_prompt_name, or remove it"
        )
    return {name: text or "" for name, text in prompts.items()}


def read_prompts(own: dict[str, Any], folder: Path) -> Prompts:
    """Return the prompts of the model whose config_sentence_transformers.json is `own`."""
    stated = stated_prompts(own, folder)
    default = stated.get(own.get("default_prompt_name") or "", "")

    def chosen(task: Task) -> str:
        names = [name for name in _NAMES[task] if name in stated]
        return stated[names[0]] if names else default

    return Prompts(chosen("document"), chosen("query"))
