"""The synthetic catalog: log-normal partition sizes and short product titles, the same on every
machine.

The sizes are P draws from a log-normal distribution with mu 9.03 and sigma (default: 1.72), scaled
by one factor so that they sum to exactly N, rounded by largest remainders, each at least 1. The
published parameters need that scaling: their median is exp(9.03) = 8,350 and their mean exp(9.03 +
1.72²/2) = 36,600, but 10M texts in 4,000 partitions leave 2,500 each. Scaling keeps the ratios and
so the coefficient of variation, sqrt(exp(sigma²) - 1) or 4.27 at sigma 1.72; mu has no effect.

A text consists of words from a small vocabulary, like the title of a product; `mean_bytes` is its
mean length. Row r of partition p (from 1) is a function of (seed, p, r, mean_bytes) alone, computed
in integers by splitmix64. numpy draws one row group at a time (1 µs per text), so that memory does
not grow with the catalog, and a partition that grows keeps its rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.catalogs.demo import CatalogSummary, clear_catalog, write_partition
from surge_dagster.engine.errors import ConfigError

LOG_MEAN = 9.03
LOG_SIGMA = 1.72
MEAN_BYTES = 47

# Part of every source version; changes when the same arguments give other rows.
_RULES = 2
_MIN_MEAN_BYTES = 16
_MAX_MEAN_BYTES = 100_000
# A row group ends at this many rows or bytes of text, which bounds memory.
_ROW_GROUP_ROWS = 65_536
_ROW_GROUP_BYTES = 8 << 20
_ID_STRIDE = 10**10

# Four kinds of words, used in turn; 64 of each, so that 6 random bits choose one.
_KINDS = (
    "compact portable folding heavy slim classic modern vintage wireless cordless rugged soft "
    "matte glossy insulated"
    " waterproof adjustable stackable reusable organic natural premium basic deluxe mini large "
    "small wide narrow tall"
    " round square curved flat padded quilted knitted woven printed striped plain dotted brushed "
    "polished coated"
    " lined hooded sleeveless stretch thermal cooling heated electric manual digital smart quiet "
    "fast slow gentle"
    " strong light dark reversible",
    "steel copper brass bronze aluminium titanium iron silver gold oak pine walnut maple bamboo "
    "cork rattan leather"
    " suede denim cotton linen wool silk fleece velvet canvas nylon polyester rubber silicone "
    "latex foam glass"
    " crystal ceramic porcelain marble granite slate stone clay concrete paper cardboard plastic "
    "acrylic resin vinyl"
    " carbon graphite enamel chrome nickel red blue green yellow white black grey brown orange "
    "purple pink",
    "kettle lamp chair table desk shelf drawer cabinet sofa cushion pillow blanket curtain "
    "carpet mirror clock vase"
    " bowl plate cup mug spoon fork knife pan pot tray jar bottle basket bag backpack wallet "
    "belt hat scarf glove"
    " jacket coat shirt dress skirt trousers shoe boot sandal sock watch ring necklace phone "
    "tablet laptop keyboard"
    " mouse speaker headset camera tripod drill hammer wrench ladder lantern",
    "set pair pack kit bundle refill spare cover case stand holder mount hook handle strap "
    "buckle zipper pocket"
    " charger cable adapter battery filter brush cloth sponge grip lid base frame wheel 2-pack "
    "4-pack 6-pack 12-pack"
    " 250ml 500ml 750ml 1l 2l 5l 100g 250g 500g 1kg 10cm 20cm 30cm 50cm 1m 2m 5m 12v 24v 230v 5w "
    "10w 60w kids women"
    " men outdoor indoor travel",
)
_WORDS = pa.array([word for kind in _KINDS for word in kind.split()], pa.string())
_MEAN_WORD_BYTES = sum(len(word.as_py()) for word in _WORDS) / len(_WORDS)

_U64 = npt.NDArray[np.uint64]


def partition_sizes(
    texts: int, partitions: int, sigma: float = LOG_SIGMA, seed: int = 0
) -> npt.NDArray[np.int64]:
    """The number of texts of each partition, as the top of this module describes."""
    if partitions < 1 or texts < partitions:
        raise ConfigError(
            f"{texts} texts can't fill {partitions} partitions with at least one text each"
        )
    if not 0 <= sigma <= 5:
        raise ConfigError(
            f"sigma, the spread of the partition sizes, must be within 0 and 5, not {sigma}"
        )
    uniform = (_mixed(seed, np.arange(partitions, dtype=np.uint64)) >> np.uint64(11)).astype(
        np.float64
    ) + 0.5
    normal = NormalDist()
    drawn = np.array(
        [math.exp(LOG_MEAN + sigma * normal.inv_cdf(u)) for u in (uniform / 2.0**53).tolist()]
    )
    # Each partition has one text; the distribution divides the rest.
    exact = drawn * ((texts - partitions) / drawn.sum())
    sizes = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(-(exact - sizes), kind="stable")[
        : texts - partitions - int(sizes.sum())
    ]
    sizes[largest_remainders] += 1
    return sizes + 1


def build_synthetic_catalog(
    out: Path,
    *,
    texts: int,
    partitions: int,
    sigma: float = LOG_SIGMA,
    mean_bytes: int = MEAN_BYTES,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> CatalogSummary:
    """Build the catalog; an earlier build in the folder is replaced."""
    if not _MIN_MEAN_BYTES <= mean_bytes <= _MAX_MEAN_BYTES:
        raise ConfigError(
            f"the mean size of a text must be {_MIN_MEAN_BYTES} to {_MAX_MEAN_BYTES} bytes, not "
            f"{mean_bytes}"
        )
    sizes = partition_sizes(texts, partitions, sigma, seed)
    clear_catalog(out, "synthetic")
    digits = max(4, len(str(partitions)))
    done = 0
    for number, size in enumerate(sizes.tolist(), start=1):
        version = _version(seed, number, size, mean_bytes)
        write_partition(
            out,
            f"category-{number:0{digits}d}",
            version,
            _row_groups(seed, number, size, mean_bytes),
        )
        done += size
        if progress is not None:
            progress(done, texts)
    return CatalogSummary(partitions, texts)


def _version(seed: int, number: int, size: int, mean_bytes: int) -> str:
    origin = f"{_RULES} {seed} {number} {size} {mean_bytes}"
    return f"synthetic-{hashlib.sha256(origin.encode()).hexdigest()[:16]}"


def _row_groups(
    seed: int, number: int, size: int, mean_bytes: int
) -> Iterator[tuple[pa.Array, pa.Array]]:
    step = min(_ROW_GROUP_ROWS, max(1, _ROW_GROUP_BYTES // mean_bytes))
    for start in range(0, size, step):
        rows = np.arange(start, min(start + step, size), dtype=np.uint64)
        ids = pa.array(number * _ID_STRIDE + rows.astype(np.int64)).cast(pa.string())
        yield ids, draw_texts(seed, number, rows, mean_bytes)


def draw_texts(seed: int, number: int, rows: _U64, mean_bytes: int = MEAN_BYTES) -> pa.StringArray:
    """The texts of the given rows of partition `number`; the same row always has the same text."""
    # The number of words is uniform between half and one and a half of the mean; a random extra
    # word corrects the mean.
    mean_words = (mean_bytes + 1) / (_MEAN_WORD_BYTES + 1)
    middle = math.floor(mean_words)
    least = max(1, middle // 2)
    choices = 2 * (middle - least) + 1
    bits = _mixed(int(_mixed(seed, np.array([number], dtype=np.uint64))[0]), rows)
    extra_word = np.uint64(round((mean_words - middle) * 2**16))
    words = (bits & np.uint64(0xFFFF_FFFF)) * np.uint64(choices) >> np.uint64(32)
    words = (
        words + np.uint64(least) + ((bits >> np.uint64(32) & np.uint64(0xFFFF)) < extra_word)
    ).astype(np.int64)

    # One byte of random bits per word, taken from the row's own sequence.
    most = least + choices
    blocks = np.arange(1, most // 8 + 2, dtype=np.uint64) << np.uint64(40)
    drawn = _scrambled(bits[:, None] + blocks).astype("<u8").view(np.uint8)[:, :most]
    position = np.arange(most)
    # The first word's kind is random too, because the kinds' words differ in length.
    kind = (
        position.astype(np.uint8) + (bits >> np.uint64(56)).astype(np.uint8)[:, None]
    ) & np.uint8(3)
    chosen = (drawn & np.uint8(63)) | (kind << np.uint8(6))
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(words, out=offsets[1:])
    flat = pa.array(chosen[position < words[:, None]])
    return pc.call_function(
        "binary_join", [pa.ListArray.from_arrays(offsets, _WORDS.take(flat)), " "]
    )


def _mixed(seed: int, counters: _U64) -> _U64:
    """Splitmix64: random bits for each (seed, counter), the same on every platform."""
    start = np.uint64(int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little"))
    return _scrambled(start + counters * np.uint64(0x9E37_79B9_7F4A_7C15))


def _scrambled(state: _U64) -> _U64:
    """The output function of splitmix64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return state ^ (state >> np.uint64(31))
