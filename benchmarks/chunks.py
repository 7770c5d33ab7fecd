"""Long documents in chunks next to a catalog of the same chunks as short texts.

    python -m benchmarks.chunks [--quick] [--characters 1500000] [--tokens 256] [--rounds 3]

Both sides encode the same texts, with the default model on the CPU, in turns in this process. What
chunks cost in addition is the splitter and its tokenizer. The documents are the long descriptions
of installed packages. A third measurement is the share of chunks that change when a few words are
added at the top of a document of short lines, with the splitter alone and with sections.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from semantic_text_splitter import TextSplitter
from tokenizers import Tokenizer

from benchmarks.harness import (
    Options,
    Target,
    at_most,
    in_turns,
    median_ratio,
    print_document,
    seconds_of,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import embed
from surge_dagster import EncoderPool, EncodingSpec, open_source, open_store
from surge_dagster.engine.chunks.source import in_chunks
from surge_dagster.engine.chunks.splitting import Document, Splitter, splitter_digest
from surge_dagster.engine.model.chunk_rule import ChunkRule
from surge_dagster.engine.model.folder import tokenizer_file

_PARTITIONS = 8
_LINES = 2_000
_WORDS = [
    "the",
    "order",
    "of",
    "keys",
    "in",
    "an",
    "index",
    "and",
    "its",
    "rows",
    "is",
    "that",
    "which",
    "they",
    "have",
    "had",
    "before",
]


def main() -> int:
    options = Options(__doc__)
    options.add_size("--characters", 1_500_000, 30_000)
    options.add_size("--tokens", 256, 64, "of a chunk at most")
    options.add_size("--rounds", 3, 1)
    arguments = options.parse_args()

    libraries = ["semantic-text-splitter", "openvino", "torch"]
    document = start_document("chunks", arguments, libraries)
    rule = ChunkRule(tokens=arguments.tokens, splitter=splitter_digest())
    spec = EncodingSpec(chunks=rule)
    with temporary_folder() as folder:
        write_documents(folder / "documents", arguments.characters)
        document |= compared(spec, folder, arguments.rounds)
    document["edited"] = changed_shares(spec, arguments.rounds)
    print_document(document, lines, targets)
    return 0


def write_documents(folder: Path, characters: int) -> None:
    """Write descriptions of packages, again and again until there are so many characters."""
    texts = sorted({str(each.metadata.json.get("description", "")) for each in distributions()})
    texts = [text for text in texts if len(text) > 1000]
    chosen: list[str] = []
    size = 0
    while size < characters:
        chosen.append(f"{len(chosen)}\n\n{texts[len(chosen) % len(texts)][: characters - size]}")
        size += len(chosen[-1])
    write(folder, list(map(str, range(len(chosen)))), chosen)


def write(folder: Path, ids: Sequence[str], texts: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    for part in range(_PARTITIONS):
        table = pa.table({"id": ids[part::_PARTITIONS], "text": texts[part::_PARTITIONS]})
        pq.write_table(table, folder / f"part={part}.parquet")


def compared(spec: EncodingSpec, folder: Path, rounds: int) -> dict[str, Any]:
    """Return seconds of both sides, of the splitter alone, and how many texts there are."""
    documents = open_source(folder / "documents")
    ids: list[str] = []
    texts: list[str] = []
    begun = time.perf_counter()
    for partition in in_chunks(documents, spec):
        for batch in partition.read():
            ids += batch.ids.to_pylist()
            texts += batch.texts.to_pylist()
    split_seconds = time.perf_counter() - begun
    write(folder / "texts", ids, texts)

    with EncoderPool(EncodingSpec(), devices="cpu") as pool:
        numbers = iter(range(10**6))

        def run(source: Path, sides: EncodingSpec) -> float:
            catalog = in_chunks(open_source(source), sides)
            store = open_store(folder / f"out-{next(numbers)}")
            return seconds_of(partial(embed, pool, catalog, store))

        sides = {
            "chunks": partial(run, folder / "documents", spec),
            "texts": partial(run, folder / "texts", EncodingSpec()),
        }
        in_turns(sides, 1)  # the pool starts, and learns its speed
        return {
            "chunks": len(texts),
            "characters": sum(map(len, texts)),
            "split_seconds": split_seconds,
            "seconds": in_turns(sides, rounds),
        }


def changed_shares(spec: EncodingSpec, rounds: int) -> list[dict[str, Any]]:
    """Return which share of a document's chunks is new after an edit at its top."""
    space = spec.resolve()
    splitter = Splitter(space)
    tokenizer = Tokenizer.from_file(str(tokenizer_file(Path(space.model_path))))
    tokenizer.no_truncation()
    alone = TextSplitter.from_huggingface_tokenizer(tokenizer, splitter.tokens - 2, trim=False)
    shares: list[dict[str, Any]] = []
    for seed in range(rounds):
        drawn = random.Random(seed)
        text = _drawn_lines(drawn, _LINES)
        edited = _drawn_lines(drawn, seed + 1) + text
        pieces = [
            [each[start:stop] for start, stop in splitter.split([Document(each, 0, len(each))])[0]]
            for each in (text, edited)
        ]
        plain = [[piece for _, piece in alone.chunk_indices(each)] for each in (text, edited)]
        shares.append(
            {"chunks": len(pieces[0]), "sections": _share(*pieces), "splitter": _share(*plain)}
        )
    return shares


def _drawn_lines(drawn: random.Random, count: int) -> str:
    drawn_lines = [" ".join(drawn.choices(_WORDS, k=drawn.randint(3, 9))) for _ in range(count)]
    return "".join(f"{line.capitalize()}.\n" for line in drawn_lines)


def _share(before: Sequence[str], after: Sequence[str]) -> float:
    known = set(before)
    return sum(piece not in known for piece in after) / len(after)


def targets(document: dict[str, Any]) -> Iterator[Target]:
    """Yield all aims."""
    seconds = document["seconds"]
    ratio = median_ratio(seconds["texts"], seconds["chunks"])
    yield Target("throughput of chunks over that of the same texts", 0.95, ratio)
    shares = [each["sections"] for each in document["edited"]]
    yield at_most("share of chunks that an edit at the top changes", 0.2, median(shares))


def lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the seconds of both sides, and the shares."""
    seconds = document["seconds"]
    yield f"{document['chunks']:,} chunks of {document['characters']:,} characters"
    for name, measured in seconds.items():
        rate = document["chunks"] / median(measured)
        yield f"{name:>10}{median(measured):>8.2f} s{rate:>9,.0f} texts/s"
    yield f"{'splitting':>10}{document['split_seconds']:>8.2f} s"
    for each in document["edited"]:
        yield (
            f"of {each['chunks']} chunks {each['sections']:.0%} are new after an edit at the top, "
            f"{each['splitter']:.0%} with the splitter alone"
        )


if __name__ == "__main__":
    sys.exit(main())
