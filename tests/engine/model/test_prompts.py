"""Prompts of a model: which one documents and queries take, and that both are part of the vector
space."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.prompts import read_prompts
from surge_dagster.engine.model.spec import EncodingSpec, space_from_json
from tests.engine.model.test_spec import small_model

__all__ = ["small_model"]


def _state(folder: Path, own: dict[str, Any]) -> EncodingSpec:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    return EncodingSpec(str(folder))


@pytest.mark.parametrize(
    ("own", "document", "query"),
    [
        ({}, "", ""),
        ({"prompts": None, "default_prompt_name": None}, "", ""),
        (
            {"prompts": {"query": "q: ", "document": "d: ", "passage": "p: ", "corpus": "c: "}},
            "d: ",
            "q: ",
        ),
        ({"prompts": {"query": "q: ", "corpus": "c: ", "passage": "p: "}}, "p: ", "q: "),
        ({"prompts": {"corpus": "c: "}}, "c: ", ""),
        ({"prompts": {"query": "q: "}}, "", "q: "),
        ({"prompts": {"s2p": "s: "}, "default_prompt_name": "s2p"}, "s: ", "s: "),
        (
            {"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt_name": "passage"},
            "p: ",
            "q: ",
        ),
        (
            {"prompts": {"query": "q: ", "document": None}, "default_prompt_name": "query"},
            "",
            "q: ",
        ),
        # As a current version of the library saves a model: what it states is empty counts.
        ({"prompts": {"query": "", "document": "", "passage": "p: "}}, "", ""),
        (
            {"prompts": {"query": "", "document": "", "s2p": "s: "}, "default_prompt_name": "s2p"},
            "",
            "",
        ),
    ],
)
def test_prompts_follow_the_rule_of_sentence_transformers(
    own: dict[str, Any], document: str, query: str, tmp_path: Path
) -> None:
    found = read_prompts(own, tmp_path)
    assert (found.document, found.query) == (document, query)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"prompts": ["query: "]}, "expected prompts as texts by name"),
        ({"prompts": {"query": 3}}, "expected prompts as texts by name"),
        (
            {"prompts": {"query": "q: "}, "default_prompt_name": "passage"},
            r"'passage' is not among.*\(query\)",
        ),
    ],
)
def test_invalid_prompts_in_the_model_configuration_are_refused(
    own: dict[str, Any], message: str, small_model: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _state(small_model, own).resolve()


def test_prompts_of_a_model_are_part_of_its_space(small_model: Path) -> None:
    plain = EncodingSpec(str(small_model)).resolve()
    both = _state(small_model, {"prompts": {"query": "query: ", "document": "passage: "}}).resolve()
    assert (both.document_prompt, both.query_prompt) == ("passage: ", "query: ")
    default = _state(
        small_model, {"prompts": {"passage": "passage: "}, "default_prompt_name": "passage"}
    ).resolve()
    assert (default.document_prompt, default.query_prompt) == ("passage: ", "passage: ")
    queries_only = _state(small_model, {"prompts": {"query": "query: "}}).resolve()
    assert len({plain.name, both.name, default.name, queries_only.name}) == 4
    assert (both.to_json()["prompt"], both.to_json()["query_prompt"]) == ("passage: ", "query: ")
    read = space_from_json(json.loads(json.dumps(both.to_json())))
    assert (read.document_prompt, read.query_prompt, read.name) == (
        "passage: ",
        "query: ",
        both.name,
    )


def test_settings_override_the_prompts_of_a_model(small_model: Path) -> None:
    plain = EncodingSpec(str(small_model)).resolve()
    _state(small_model, {"prompts": {"query": "query: ", "document": "passage: "}})
    spec = EncodingSpec(str(small_model), document_prompt="d: ", query_prompt="q: ")
    assert (spec.resolve().document_prompt, spec.resolve().query_prompt) == ("d: ", "q: ")
    without = EncodingSpec(str(small_model), document_prompt="", query_prompt="").resolve()
    assert without.name == plain.name
