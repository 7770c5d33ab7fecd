"""How fast this pool is, measured once and remembered: B_min and the planner's forecasts start from it.

A few hundred texts of about 50 bytes, the size of a product title, are encoded through an ordinary arena, first one
round to warm up, then twice; the faster round counts. The answer belongs to a space, a backend, a precision, the
devices and the library versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from surge_dagster.engine.model.fingerprint import cache_key, processor, usable_cores
from surge_dagster.engine.support import disk_cache

if TYPE_CHECKING:
    from surge_dagster.engine.encoder.pool import EncoderPool

_TEXTS = 256
_TEXTS_OF_FAST_POOLS = 16_384
_FAST_TEXTS_PER_SECOND = 10_000
_ROUNDS = 2
_WORDS = (
    "steel bottle cotton shirt lamp oak table garden hose travel mug wool scarf desk chair ceramic bowl running shoe "
    "phone case glass jar bath towel ink pen leather belt camping stove rain jacket bread knife"
)


def texts_per_second(pool: EncoderPool) -> float:
    """Texts of about 50 bytes that the pool encodes per second; from disk when it was measured before."""
    machine = f"{processor()} {usable_cores()}"
    key = cache_key(pool.space.spec_sha256, pool.device, pool.backend_detail, pool.precision, machine)
    kept = disk_cache.read_json(f"speed/{key}.json")
    if kept is not None and isinstance(kept.get("texts_per_second"), int | float):
        return float(kept["texts_per_second"])
    rate = _measure(pool, _TEXTS)
    if rate > _FAST_TEXTS_PER_SECOND:
        # A few hundred texts are over before all of a fast pool is at work.
        rate = _measure(pool, _TEXTS_OF_FAST_POOLS)
    disk_cache.write_json(f"speed/{key}.json", {"texts_per_second": round(rate, 1), "space": pool.space.name})
    return round(rate, 1)


def _measure(pool: EncoderPool, count: int) -> float:
    words = _WORDS.split()
    texts = []
    for row in range(count):
        # Six to ten words, never the same six: a walk through the list with a step that depends on the row.
        step, size = 1 + row % 31, 6 + row % 5
        texts.append(" ".join(words[(row + step * place) % len(words)] for place in range(size)))
    column = pa.array(texts, pa.large_string())
    with pool.arena(slots=1, max_texts=count, max_bytes=128 * count) as arena:
        slot = arena.acquire()
        slot.append(column)
        seconds = [pool.encode(slot).encode_seconds for _ in range(1 + _ROUNDS)]
        slot.release()
    return count / min(seconds[1:])
