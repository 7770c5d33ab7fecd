"""Texts of the encode benchmark, and models of known shapes.

- demo: docstrings of the installed Python packages, in their partitions.
- short: the synthetic catalog's texts, 47 bytes on average, in partitions of log-normal sizes.
- long: the same words in texts of 16 to 512 tokens, uniform in the logarithm of the length. Every
  side is set to read 512 tokens, also for models that read fewer by default.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from benchmarks.gpu_models import SHAPES, make_model
from benchmarks.paced_runs import drawn_texts
from benchmarks.synthetic import partition_sizes
from surge_dagster import EncodingSpec, open_source
from surge_dagster.catalogs.demo import build_demo_catalog, write_partition
from surge_dagster.engine.model.spec import Space

INPUTS = ("demo", "short", "long")
_LONG_TOKENS = (16, 512)
_TEXTS_PER_PARTITION = 2_500  # of the papers' workload: 10M texts in 4,000 partitions
# Parsing every installed package takes longer than measuring, so the demo catalog is capped.
_LEAST_DEMO_TEXTS = 10_000
# A long text is cut from eight drawn ones of 1,000 bytes: over 550 words, each at least a token.
_PIECES = 8
_PIECE_BYTES = 1_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts and the sizes of their partitions.

    Args:
        max_length: in tokens; None for the model's own.
    """

    name: str
    texts: list[str]
    partitions: list[tuple[str, int]]
    max_length: int | None = None

    def write_catalog(self, folder: Path) -> Path:
        """Write these texts as a catalog for a whole run to read."""
        folder.mkdir()
        start = 0
        for key, size in self.partitions:
            ids = pa.array(map(str, range(size)), pa.string())
            texts = pa.array(self.texts[start : start + size])
            write_partition(folder, key, "v1", [(ids, texts)])
            start += size
        return folder


def draw_workload(name: str, texts: int, scratch: Path) -> Workload:
    """Return the workload of this name; `long` gets a tenth of the texts."""
    if name == "demo":
        return demo_workload(scratch / "catalog", texts)
    if name == "short":
        return short_workload(texts)
    return long_workload(max(20, texts // 10), load_tokenizer(EncodingSpec().resolve()))


def demo_workload(folder: Path, texts: int) -> Workload:
    """Draw docstrings at random from a demo catalog; each stays in its partition."""
    limit = 2 * texts
    if texts >= 1_000:
        limit = max(_LEAST_DEMO_TEXTS, texts)
    build_demo_catalog(folder, limit=limit)
    rows = []
    for partition in open_source(folder):
        for batch in partition.read():
            rows += [(partition.key, text) for text in batch.texts.to_pylist()]
    rows = random.Random(0).sample(rows, min(texts, len(rows)))
    rows.sort(key=lambda row: row[0])
    sizes = Counter(key for key, _ in rows)
    return Workload("demo", [text for _, text in rows], list(sizes.items()))


def short_workload(texts: int, seed: int = 0) -> Workload:
    """Draw synthetic texts of 47 bytes in partitions of log-normal sizes."""
    sizes = partition_sizes(texts, max(1, texts // _TEXTS_PER_PARTITION), seed=seed)
    drawn = drawn_texts(texts, seed=seed).to_pylist()
    keys = [f"part-{number}" for number in range(len(sizes))]
    return Workload("short", drawn, list(zip(keys, sizes.tolist(), strict=True)))


def long_workload(texts: int, tokenizer: Tokenizer) -> Workload:
    """Draw texts of 16 to 512 tokens, special ones included, each cut from a longer one at a
    token's end."""
    low, high = _LONG_TOKENS
    logarithms = np.random.default_rng(0).uniform(np.log(low), np.log(high + 1), texts)
    targets = np.clip(np.exp(logarithms).astype(np.int64), low, high).tolist()
    pieces = drawn_texts(_PIECES * texts, _PIECE_BYTES, number=2).to_pylist()
    special = tokenizer.num_special_tokens_to_add(False)
    cut = []
    for row, target in enumerate(targets):
        words = " ".join(pieces[row * _PIECES : (row + 1) * _PIECES]).split(" ", target)
        enough = " ".join(words[:target])
        offsets = tokenizer.encode(enough, add_special_tokens=False).offsets
        cut.append(enough[: offsets[target - special - 1][1]])
    return Workload("long", cut, [("part-0", texts)], max_length=high)


def load_tokenizer(space: Space) -> Tokenizer:
    """Return the model's tokenizer without padding and truncation."""
    tokenizer = Tokenizer.from_file(str(Path(space.model_path) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def token_lengths(space: Space, texts: list[str]) -> np.ndarray:
    """Return the tokens of each text, special ones included, at most as many as the model reads."""
    encoded = load_tokenizer(space).encode_batch_fast(texts)
    return np.minimum([len(tokens) for tokens in encoded], space.max_length)


def spec_of(model: str, folder: Path) -> EncodingSpec:
    """Return the spec of the default model ("minilm"), or of a shape with random weights, which is
    written into the folder and has the default model's tokenizer."""
    spec = EncodingSpec()
    if model == "minilm":
        return spec
    make_model(folder / model, SHAPES[model], Path(spec.resolve().model_path))
    return EncodingSpec(str(folder / model))
