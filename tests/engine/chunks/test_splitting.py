"""Where documents are cut: nothing is lost, and no chunk is longer than the model reads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from surge_dagster.engine.chunks import splitting
from surge_dagster.engine.chunks.boundaries import sections
from surge_dagster.engine.chunks.splitting import Document, NoRoom, Splitter, splitter_digest
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.chunk_rule import ChunkRule
from surge_dagster.engine.model.spec import EncodingSpec
from tests.engine.chunks.documents import WORDS, cut, prose, splitter, tokens, whole

PIECES = st.sampled_from(
    [*WORDS, " ", "\n", "\n\n", ". ", "# Title\n\n", "```\n", "| a |\n", "\r\n"]
)
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=300).map("".join)
KINDS = {
    "WordPiece": "bert_cls",
    "sentencepiece": "xlm_roberta_with_dense",
    "bytes": "qwen3_last_token",
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.encoder import tiny_models

    return getattr(tiny_models, KINDS[request.param])(tmp_path_factory.mktemp("model"))


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.sampled_from(["text", "markdown"]), st.sampled_from(["", "passage: "]))
@example("", "text", "")
@example("🚀" * 500, "text", "")
@example("x" * 3000, "markdown", "")
@example("東" * 900, "text", "passage: ")
def test_chunks_are_the_text_and_none_is_too_long(
    model: Path, text: str, text_format: str, prompt: str
) -> None:
    own = splitter(model, prompt, tokens=48, format=text_format)

    chunks = cut(own, text)

    assert "".join(chunks) == text
    assert max(tokens(own, chunk) for chunk in chunks) <= 48
    assert all(chunks) or not text


@settings(deadline=None, max_examples=40)
@given(TEXTS)
def test_overlapping_chunks_cover_the_text_and_none_is_too_long(model: Path, text: str) -> None:
    own = splitter(model, tokens=48, overlap=12)

    [chunks] = own.split([whole(text)])

    assert [chunks[0].start, chunks[-1].stop] == [0, len(text)]
    assert all(one.start <= other.start <= one.stop for one, other in pairwise(chunks))
    assert all(tokens(own, text[start:stop]) <= 48 for start, stop in chunks)


def test_chunk_repeats_the_last_words_of_the_one_before(demo_folder: Path) -> None:
    own = splitter(demo_folder, tokens=64, overlap=16)
    text = prose(Random(1), 60)

    [chunks] = own.split([whole(text)])
    repeated = [text[after.start : before.stop] for before, after in pairwise(chunks)]

    assert len(repeated) > 5
    assert all(8 <= tokens(own, words) - 2 <= 16 for words in repeated)


def test_only_the_column_is_cut_and_the_rest_is_repeated(demo_folder: Path) -> None:
    own = splitter(demo_folder, tokens=48, column="body")
    body = prose(Random(2), 40)
    document = Document(f"Bottle: {body} (steel)", 8, 8 + len(body))

    [chunks] = own.split([document])
    texts = [document.with_chunk(chunk) for chunk in chunks]

    assert "".join(document.text[start:stop] for start, stop in chunks) == body
    assert all(text.startswith("Bottle: ") and text.endswith(" (steel)") for text in texts)
    assert max(tokens(own, text) for text in texts) <= 48


def test_rest_that_leaves_no_room_is_named(demo_folder: Path) -> None:
    own = splitter(demo_folder, tokens=48, column="body")
    title = "steel " * 60
    fitting = Document("Bottle: cold", 8, 12)

    with pytest.raises(NoRoom) as refused:
        own.split([fitting, Document(title + "cold", len(title), len(title) + 4)])

    assert refused.value.place == 1
    assert refused.value.tokens == 62


def test_template_that_leaves_a_few_tokens_is_named(demo_folder: Path) -> None:
    own = splitter(demo_folder, tokens=256, column="body")
    title = "a " * 252
    body = "antidisestablishmentarianism is unbelievably discombobulating; " * 8

    with pytest.raises(NoRoom):
        own.split([Document(title + body, len(title), len(title + body))])


@pytest.mark.parametrize("text", ["\n" * 300_000, " " * 300_000, "word" + " " * 300_000 + "word"])
def test_long_gaps_are_looked_at_once(demo_folder: Path, text: str) -> None:
    """With a look at each place of a gap from each other one, this would not end."""
    assert "".join(cut(splitter(demo_folder, tokens=64), text)) == text


def test_overlap_without_white_space_begins_with_a_token(demo_folder: Path) -> None:
    own = splitter(demo_folder, tokens=64, overlap=16)
    text = "東京の夜景は美しい。大阪の食べ物もおいしい。" * 12

    [chunks] = own.split([whole(text)])

    assert all(after.start < before.stop for before, after in pairwise(chunks))


def test_text_that_fits_is_one_chunk(demo_folder: Path) -> None:
    own = splitter(demo_folder, tokens=48)

    assert cut(own, "A bottle.\n\nA hat.") == ["A bottle.\n\nA hat."]


def test_chunks_do_not_depend_on_the_other_documents(demo_folder: Path) -> None:
    own = splitter(demo_folder, tokens=48)
    texts = [prose(Random(seed), 30 * seed) for seed in range(1, 6)]

    together = own.split([whole(text) for text in texts])

    assert together == [own.split([whole(text)])[0] for text in texts]


def test_markdown_is_cut_before_headings(demo_folder: Path) -> None:
    text = "".join(f"# Part {part}\n\n{prose(Random(part), 3)}\n\n" for part in range(9))
    own = splitter(demo_folder, tokens=128, format="markdown")

    chunks = cut(own, text)

    assert len(chunks) > 3
    assert all(chunk.startswith("# Part") for chunk in chunks)


@pytest.mark.parametrize("between", ["\n", " "])
def test_edit_at_the_top_of_a_document_changes_few_chunks(demo_folder: Path, between: str) -> None:
    """Short lines and one long paragraph, whose chunks a splitter alone would all cut anew."""
    own = splitter(demo_folder, tokens=128)
    shares: list[float] = []
    for seed in range(5):
        random = Random(seed)
        text = prose(random, 420, between, paragraph=10**6)
        before = cut(own, text)
        after = cut(own, prose(random, seed + 1, between) + text)
        assert len(before) >= 50
        shares.append(len(set(after) - set(before)) / len(after))

    assert max(shares) < 0.25
    assert sum(shares) / len(shares) < 0.15


@settings(deadline=None, max_examples=50)
@given(TEXTS.map(lambda text: text * 20), st.sampled_from(["text", "markdown"]))
def test_sections_begin_in_order_from_the_start(text: str, text_format: str) -> None:
    begins = sections(text, 40, text_format)  # pyright: ignore[reportArgumentType]

    assert begins[0] == 0
    assert begins == sorted(set(begins))
    assert begins[-1] < max(1, len(text))


def test_markdown_is_not_divided_inside_a_code_block() -> None:
    code = "```\n" + "# a comment\n\nx = 1\n\n" * 40 + "```\n\n"
    text = prose(Random(3), 60, "\n\n") + code + prose(Random(4), 60, "\n\n")

    begins = sections(text, 100, "markdown")

    first = text.index(code)
    assert len(begins) > 10
    assert [place for place in begins if first < place < first + len(code) - 2] == []


def test_splitter_of_another_version_than_the_space_is_refused(demo_folder: Path) -> None:
    rule = ChunkRule(tokens=48, splitter="another")
    space = EncodingSpec(str(demo_folder), chunks=rule).resolve()

    with pytest.raises(ConfigError, match="chunks of another version of semantic-text-splitter"):
        Splitter(space)


def test_digest_of_the_splitter_is_that_of_its_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = splitter_digest()
    splitter_digest.cache_clear()
    monkeypatch.setattr(splitting, "_PROBE_CHARACTERS", (13, 40, 100))

    try:
        assert splitter_digest() != before
    finally:
        splitter_digest.cache_clear()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"tokens": 4}, "tokens is at least 8, not 4"),
        ({"tokens": 64, "overlap": 64}, "overlap is 64 tokens of chunks of at most 64"),
        ({"overlap": -1}, "overlap is 0 or more tokens, not -1"),
        ({"tokens": 10**6}, "tokens is 1000000, and .* reads 256 tokens"),
        ({"overlap": 250}, "overlap is 250 tokens of chunks of at most 256"),
        ({"format": "html"}, "format is text or markdown, not 'html'"),
    ],
)
def test_impossible_rule_is_refused_before_work_starts(
    demo_folder: Path, rule: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EncodingSpec(str(demo_folder), chunks=ChunkRule(**rule)).resolve()  # pyright: ignore


def test_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="need a model with a fast tokenizer"):
        EncodingSpec("hash://16", chunks=ChunkRule()).resolve()
