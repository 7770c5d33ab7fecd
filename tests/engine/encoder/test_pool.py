"""The pool's call: the right vector in the right row, for any portions, workers and threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder import schedule
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeMetrics
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.errors import ConfigError, EncoderError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.store import open_store
from surge_dagster.engine.verify.reencoding import SampledRows
from tests.engine.encoder.conftest import column, encode, filled_slot
from tests.engine.encoder.faulty_pools import harmless, open_descriptors


def _texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [f"{seed} text {row} " + "ü" * int(rng.integers(0, 30)) for row in range(count)]


def test_rows_get_their_vectors_with_any_portions_and_number_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = _texts(3_000)
    expected = hash_vectors(["say: " + text for text in texts], 24)
    small = schedule.PortionSizes(texts=97, largest=4 << 20, smallest=800)
    monkeypatch.setattr(schedule, "PORTIONS", small)
    for workers in ("cpu", "cpu,cpu,cpu"):
        with (
            EncoderPool(
                EncodingSpec("hash://24", document_prompt="say: "), devices=workers
            ) as pool,
            filled_slot(pool, texts) as slot,
        ):
            metrics = pool.encode(slot)
            assert np.array_equal(slot.matrix(0, 3_000), expected)
            costs = metrics.costs
            assert costs.texts_computed == 3_000
            assert costs.tokens == sum(1 + len(f"say: {text}".encode()) // 4 for text in texts)
            assert 0 < costs.forward_seconds <= metrics.workers * costs.encode_seconds


def test_workers_inherit_no_secrets_and_allocate_like_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "s",
        "HF_TOKEN": "s",
        "SURGE_STORAGE_OPTIONS": '{"secret_access_key": "s"}',
        "SURGE_GCP": '{"gcp_credentials": "s"}',
        "SURGE_ALERT_WEBHOOK": "https://s",
        "DATABASE": "postgresql://user:s@host/db",
        "OPENAI_API_KEY": "s",
        "DD_APIKEY": "s",
        "MYSQL_PWD": "s",
        "SHARED": "https://account.blob.core.windows.net/c?sig=s",
    }
    needed = {"SURGE_CACHE_DIR": os.environ["SURGE_CACHE_DIR"], "KEYBOARD": "us"}
    for name, value in (secrets | needed).items():
        monkeypatch.setenv(name, value)
    with EncoderPool(EncodingSpec("hash://8"), devices="cpu") as pool:
        pool.start()
        [pid] = pool.worker_pids
        inherited = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    environment = dict(entry.split("=", 1) for entry in inherited if entry)
    assert not environment.keys() & secrets.keys()
    needed["ARROW_DEFAULT_MEMORY_POOL"] = "jemalloc"
    assert needed.items() <= environment.items()


def test_all_threads_of_workers_have_the_niceness_of_the_pool() -> None:
    with EncoderPool(EncodingSpec("hash://8"), devices="cpu", niceness=7) as pool:
        assert np.array_equal(encode(pool, ["a"]), hash_vectors(["a"], 8))
        [pid] = pool.worker_pids
        expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
        for thread in Path(f"/proc/{pid}/task").iterdir():
            assert os.getpriority(os.PRIO_PROCESS, int(thread.name)) == expected


def test_vectors_have_the_type_of_the_space_and_truncated_rows_are_counted_where_they_are() -> None:
    texts = ["short", "x" * 400, "short", "y" * 4_000, ""]
    with (
        EncoderPool(
            EncodingSpec("hash://16", max_length=100, dtype="float16"), devices="cpu"
        ) as pool,
        filled_slot(pool, texts) as slot,
    ):
        pool.encode(slot)
        assert slot.truncation(0, 5).tolist() == [0, 1, 0, 1, 0]
        assert slot.truncation(1, 4).tolist() == [1, 0, 1]
        assert slot.matrix(0, 5).dtype == np.float16
        assert np.array_equal(slot.matrix(0, 5), hash_vectors(texts, 16).astype(np.float16))


def test_empty_slot_costs_nothing_and_a_slot_can_be_extended(hash_pool: EncoderPool) -> None:
    with hash_pool.arena(slots=1, max_texts=10, max_bytes=100) as arena:
        slot = arena.acquire()
        assert hash_pool.encode(slot) == EncodeMetrics()
        slot.append(column(["a"]))
        hash_pool.encode(slot)
        slot.append(column(["b", ""]))
        hash_pool.encode(slot)
        assert np.array_equal(slot.matrix(0, 3), hash_vectors(["a", "b", ""], hash_pool.dimension))


@pytest.mark.parametrize(
    "use", [EncoderPool.start, EncoderPool.measure_speed, lambda pool: encode(pool, ["a"])]
)
def test_pool_starts_its_workers_once_at_the_first_use(
    use: Callable[[EncoderPool], object],
) -> None:
    with EncoderPool(EncodingSpec("hash://8"), devices="cpu,cpu") as pool:
        assert (pool.space.dimension, pool.device, pool.workers) == (8, "cpu", 2)
        assert (pool.worker_pids, pool.start_seconds) == ([], 0)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(use, [pool, pool]))
        pids = pool.worker_pids
        assert len(pids) == 2 and pool.start_seconds > 0
        assert pool.speed.workers == 2 and pool.precision == "fp32"
        assert pool.worker_pids == pids


def test_pool_that_was_never_started_can_be_closed_and_starts_no_more() -> None:
    with EncoderPool(EncodingSpec("hash://8"), devices="cpu") as pool:
        pass
    with pytest.raises(EncoderError, match="the encoder pool is closed"):
        pool.start()
    assert pool.worker_pids == []


def test_closed_pool_refuses_calls_and_leaves_neither_process_nor_descriptor() -> None:
    gc.collect()
    before = open_descriptors()
    pool = EncoderPool(EncodingSpec("hash://8"), devices="cpu,cpu")
    pool.start()
    pids = pool.worker_pids
    arena = pool.arena(slots=1, max_texts=1, max_bytes=10)
    slot = arena.acquire()
    slot.append(column(["a"]))
    pool.close()
    pool.close()
    with pytest.raises(EncoderError, match="closed"):
        pool.encode(slot)
    arena.close()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    del slot, arena
    gc.collect()
    assert open_descriptors() - before == set()


def test_speed_measured_by_a_start_is_cached_for_the_next_one(cache_folder: Path) -> None:
    spec = EncodingSpec("hash://40")
    with EncoderPool(spec, devices="cpu") as first:
        measured = first.speed.texts_per_second
    with EncoderPool(spec, devices="cpu") as second:
        assert second.speed.texts_per_second == measured
    assert measured > 0
    assert second.start_seconds > 0
    assert (second.device, second.precision, second.dimension) == ("cpu", "fp32", 40)
    assert second.start().backend == "hash"


def test_only_the_chosen_rows_are_encoded_and_the_others_keep_their_vectors(
    hash_pool: EncoderPool,
) -> None:
    texts = harmless(5_000)
    expected = hash_vectors(texts, 16)
    for rows in (
        np.arange(0, 5_000, 3),
        np.arange(700, 900),
        np.array([4_999]),
        np.empty(0, np.intp),
    ):
        with filled_slot(hash_pool, texts) as slot:
            slot.matrix(0, 5_000)[:] = 7
            metrics = hash_pool.submit(slot, rows=rows).result()
            expected_matrix = np.full((5_000, 16), 7, np.float32)
            expected_matrix[rows] = expected[rows]
            assert metrics is not None and metrics.costs.texts_computed == len(rows)
            assert np.array_equal(slot.matrix(0, 5_000), expected_matrix)


def test_pool_of_one_side_is_refused_where_the_other_is_needed(tmp_path: Path) -> None:
    spec = EncodingSpec("hash://8", query_prompt="query: ")
    with (
        EncoderPool(spec) as pool,
        pytest.raises(ConfigError, match='Start the pool with task="query"'),
    ):
        search(open_store(str(tmp_path)), pool, ["a"])
    with (
        EncoderPool(spec, task="query") as pool,
        pytest.raises(ConfigError, match="the pool encodes queries"),
    ):
        SampledRows(pool, pool.space, 3, 0)
