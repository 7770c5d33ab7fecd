"""Texts of the encode benchmark, and models of known shapes.

- demo: docstrings of the installed Python packages, in their partitions.
- short: the synthetic catalog's texts, 47 bytes on average, in partitions of log-normal sizes.
- long: the same words in texts of 16 to 512 tokens, uniform in the logarithm of the length. Every side is set to read
  512 tokens, also for models that read fewer by default.

The shapes have random weights: speed depends on the shape alone, and nothing has to be downloaded. Their tokenizer is
the demo model's, so texts have the same tokens on every shape.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from benchmarks.synthetic import draw_texts, partition_sizes
from surge_dagster.catalogs.demo import build_demo_catalog
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.tables.opening import open_source

INPUTS = ("demo", "short", "long")
# hidden size, intermediate size, layers, heads
SHAPES = {"bge-base": (768, 3_072, 12, 12), "e5-large": (1_024, 4_096, 24, 16)}
LONG_TOKENS = (16, 512)

_TEXTS_PER_PARTITION = 2_500  # of the papers' workload: 10M texts in 4,000 partitions
# Parsing every installed package takes longer than measuring, so the demo catalog is capped.
_LEAST_DEMO_TEXTS = 10_000
# A long text is cut from eight drawn ones of 1,000 bytes: over 550 words, each at least a token.
_PIECES, _PIECE_BYTES = 8, 1_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts and the sizes of their partitions; `max_length` is in tokens, None for the model's own."""

    name: str
    texts: list[str]
    partitions: list[tuple[str, int]]
    max_length: int | None = None

    @property
    def mean_text_bytes(self) -> float:
        return sum(len(text.encode()) for text in self.texts) / len(self.texts)

    def write_catalog(self, folder: Path) -> Path:
        """Write these texts as a catalog for a whole run to read."""
        start = 0
        for key, size in self.partitions:
            path = folder / f"partition={encode_key(key)}" / "part-0.parquet"
            path.parent.mkdir(parents=True)
            ids = [str(row) for row in range(size)]
            pq.write_table(pa.table({"id": ids, "text": self.texts[start : start + size]}), path)
            start += size
        return folder


def draw_workload(name: str, texts: int, seed: int, spec: EncodingSpec, scratch: Path) -> Workload:
    """The workload of this name; `long` gets a tenth of the texts."""
    if name == "demo":
        return demo_workload(scratch / "catalog", texts, seed)
    if name == "short":
        return short_workload(texts, seed)
    return long_workload(max(20, texts // 10), seed, load_tokenizer(spec.resolve()))


def demo_workload(folder: Path, texts: int, seed: int) -> Workload:
    """Docstrings drawn at random from a demo catalog; each stays in its partition."""
    build_demo_catalog(folder, limit=max(_LEAST_DEMO_TEXTS, texts) if texts >= 1_000 else 2 * texts)
    rows = [
        (partition.key, text)
        for partition in open_source(folder)
        for batch in partition.read()
        for text in batch.texts.to_pylist()
    ]
    rows = sorted(random.Random(seed).sample(rows, min(texts, len(rows))), key=lambda row: row[0])
    sizes: dict[str, int] = {}
    for key, _ in rows:
        sizes[key] = sizes.get(key, 0) + 1
    return Workload("demo", [text for _, text in rows], list(sizes.items()))


def short_workload(texts: int, seed: int) -> Workload:
    """Synthetic texts of 47 bytes in partitions of log-normal sizes."""
    sizes = partition_sizes(texts, max(1, texts // _TEXTS_PER_PARTITION), seed=seed)
    drawn = draw_texts(seed, 1, np.arange(texts, dtype=np.uint64)).to_pylist()
    return Workload(
        "short", drawn, [(f"part-{number}", size) for number, size in enumerate(sizes.tolist())]
    )


def long_workload(texts: int, seed: int, tokenizer: Tokenizer) -> Workload:
    """Texts of 16 to 512 tokens, special ones included, each cut from a longer one at a token's end."""
    low, high = LONG_TOKENS
    targets = np.exp(
        np.random.default_rng(seed).uniform(np.log(low), np.log(high + 1), texts)
    ).astype(np.int64)
    pieces = draw_texts(
        seed, 2, np.arange(_PIECES * texts, dtype=np.uint64), _PIECE_BYTES
    ).to_pylist()
    drawn = [" ".join(pieces[start : start + _PIECES]) for start in range(0, len(pieces), _PIECES)]
    special = tokenizer.num_special_tokens_to_add(False)
    cut = []
    for text, target in zip(drawn, np.clip(targets, low, high).tolist(), strict=True):
        enough = " ".join(text.split(" ", target)[:target])
        offsets = tokenizer.encode(enough, add_special_tokens=False).offsets
        cut.append(enough[: offsets[target - special - 1][1]])
    return Workload("long", cut, [("part-0", texts)], max_length=high)


def load_tokenizer(space: Space) -> Tokenizer:
    """The model's tokenizer without padding and truncation."""
    tokenizer = Tokenizer.from_file(str(Path(space.model_path) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def token_lengths(space: Space, texts: list[str]) -> np.ndarray:
    """Tokens of each text, special ones included, at most as many as the model reads."""
    encoded = load_tokenizer(space).encode_batch_fast(texts)
    return np.minimum([len(tokens) for tokens in encoded], space.max_length)


def write_model(name: str, folder: Path) -> str:
    """A sentence-transformers folder with a BERT of this shape, mean pooling and normalization; its path."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    hidden, intermediate, layers, heads = SHAPES[name]
    demo = EncodingSpec().resolve().model_path
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(demo, local_files_only=True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=512,
    )
    plain = folder / "plain"
    BertModel(config).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    transformer = Transformer(str(plain), max_seq_length=512)
    model = SentenceTransformer(
        modules=[transformer, Pooling(hidden, "mean"), Normalize()], device="cpu"
    )
    model.save(str(folder / name))
    return str(folder / name)
