"""A model's queries and documents get the vectors that files have, and are counted as the model
reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.parity import lowest_cosine
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store import open_store
from surge_dagster.service.errors import Refusal
from surge_dagster.service.spaces import LaneSettings, ServedSpaces
from tests.engine.encoder.conftest import column, tiny_model
from tests.engine.encoder.test_zoo import ALSO_ELSEWHERE, ZOO
from tests.engine.odd_texts import short_texts
from tests.engine.runs import finish, in_memory, make_run
from tests.service.running import serving
from tests.small_catalogs import read_embedded

FLOOR = 0.99999
TEXTS = ["", "steel bottle", "Größe 43", "the index " * 3, "a", "3.14 lid and strap"]
LONG = "word " * 300


@pytest.mark.soak
def test_prompts_and_tokens_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = tiny_model("bert_with_prompts", tmp_path)
    store = open_store(tmp_path / "output")
    claim_space(store, EncodingSpec(str(folder)).resolve())
    model = SentenceTransformer(str(folder), device="cpu")
    with ServedSpaces(store, LaneSettings("cpu", backend="torch")) as spaces:
        spaces.start()
        served = spaces.find("current")
        for lane, expected, prompt in (
            (served.queries, model.encode_query(TEXTS), "query about: "),
            (served.documents, model.encode_document(TEXTS), "a passage of the index: "),
        ):
            answer = lane.accept(TEXTS).result()
            assert lowest_cosine(answer.vectors, expected) >= FLOOR
            ids = model.tokenizer([prompt + text for text in TEXTS])["input_ids"]
            assert answer.tokens == sum(map(len, ids))
            with pytest.raises(Refusal, match="64 tokens"):
                lane.accept([LONG])
            cut = lane.accept([LONG], truncate=True).result()
            assert lowest_cosine(cut.vectors, model.encode([prompt + LONG])) >= FLOOR


@pytest.mark.soak
@pytest.mark.parametrize("name", [*ZOO, *ALSO_ELSEWHERE])
def test_answers_of_every_architecture_are_those_of_searches_and_files(
    name: str, tmp_path: Path
) -> None:
    spec = EncodingSpec(str(tiny_model(name, tmp_path)))
    output = tmp_path / "output"
    texts = [text for text in short_texts() if text]  # an empty one has no token in some
    rows = [(str(row), text) for row, text in enumerate(texts)]
    stated = spec.resolve()
    if not (stated.query_prompt or stated.document_prompt):
        spec = replace(spec, query_prompt="query: ", document_prompt="passage: ")
    with (
        EncoderPool(spec, devices="cpu") as pool,
        EncoderPool(spec, task="query", devices="cpu") as of_search,
    ):
        finish(make_run(pool, in_memory({"a": rows}), output))
        expected = {"/v1": of_search.vectors(column(texts))}
        expected["/documents/v1"] = read_embedded(output, pool.space.name, "a").matrix
    with ServedSpaces(open_store(output), LaneSettings("cpu", promised_seconds=600)) as spaces:
        spaces.start()
        with serving(spaces) as url:
            for root, vectors in expected.items():
                client = openai.OpenAI(base_url=f"{url}{root}", api_key="none")
                answer = client.embeddings.create(
                    model="current", input=texts, extra_body={"truncate": True}
                )
                found = np.array([each.embedding for each in answer.data])
                assert lowest_cosine(found, vectors) >= FLOOR
    assert lowest_cosine(expected["/v1"], expected["/documents/v1"]) < FLOOR, "of different prompts"
