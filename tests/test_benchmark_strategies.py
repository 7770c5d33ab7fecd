"""The strategies of the evaluation write the same files with the promised calls, and are measured from outside."""

from __future__ import annotations

import time
from dataclasses import replace
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.evaluation import strategies
from benchmarks.evaluation.baselines import first_fit_decreasing
from benchmarks.evaluation.encoders import SentenceTransformersTexts
from benchmarks.evaluation.metering import Outcome, covered, union
from benchmarks.evaluation.strategies import BASELINES, STRATEGIES, Case, measure, run
from benchmarks.paced_runs import drawn_partitions, paced_pool
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from tests.engine.encoder.conftest import tiny_model
from tests.small_catalogs import assert_embedded, numbered_rows, partition_of, read_embedded

SIZES = {"a": 30, "b": 5, "none": 0, "c": 70, "one": 1, "d": 12, "e": 24, "f": 26}  # c is above B_max
ROWS = {key: numbered_rows(key, size) for key, size in SIZES.items()}
BOUNDS = Thresholds(b_min=25, b_max=50)
TEXTS = sum(SIZES.values())


def partitions() -> list[Partition]:
    return [replace(partition_of(key, rows), rows=len(rows)) for key, rows in ROWS.items()]


@pytest.fixture(scope="module")
def outcomes(hash_pool: EncoderPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of each strategy; their files are compared with the catalog and with each other."""
    found: dict[str, Outcome] = {}
    digests: dict[str, str] = {}
    for name in STRATEGIES:
        output = tmp_path_factory.mktemp(name)
        found[name] = run(name, partitions(), LocalStore(output), hash_pool, BOUNDS)
        for key, rows in ROWS.items():
            facts = assert_embedded(output, hash_pool.space.name, key, rows)
            assert facts.content_digest == digests.setdefault(key, facts.content_digest)
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_writes_each_row_with_its_own_vector(outcomes: dict[str, Outcome], name: str) -> None:
    assert (outcomes[name].texts, outcomes[name].partitions) == (TEXTS, len(SIZES))


def test_calls_are_one_per_partition_per_batch_or_per_bin(outcomes: dict[str, Outcome]) -> None:
    calls = {name: outcome.calls for name, outcome in outcomes.items()}
    bins = first_fit_decreasing(list(SIZES.values()), 25)
    assert calls["pbp"] == len(SIZES) - 1  # an empty partition needs none
    assert calls["fsb"] == ceil(TEXTS / 25)
    assert calls["pb-pbp-lb"] == len(bins)
    assert calls["surge-async"] == calls["surge-sync"] == calls["surge-without-zero-copy"] < calls["pbp"]
    assert calls["surge-without-superbatches"] >= calls["pbp"]


def test_only_surge_bounds_the_texts_of_a_call(outcomes: dict[str, Outcome]) -> None:
    largest = {name: outcome.largest_superbatch_texts for name, outcome in outcomes.items()}
    assert (largest["pbp"], largest["fsb"], largest["pb-pbp-lb"]) == (70, 25, 70)
    assert all(largest[name] <= 50 for name in STRATEGIES if name not in BASELINES)


def test_fixed_batches_hold_all_vectors_before_the_first_file_and_surge_does_not(outcomes: dict[str, Outcome]) -> None:
    until_last_call = {name: outcome.wall_seconds - outcome.tail_seconds for name, outcome in outcomes.items()}
    first_file = {name: outcome.time_to_first_output_seconds for name, outcome in outcomes.items()}
    assert first_file["fsb"] > until_last_call["fsb"]
    # A run has three slots: the fourth SuperBatch is gathered only when the files of the first are written.
    assert outcomes["surge-async"].calls > 3
    for name in ("surge-async", "surge-sync", "pbp", "pb-pbp-lb"):
        assert first_file[name] < until_last_call[name]


def test_naive_serialization_makes_the_column_from_lists(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naive, columns = strategies._naive_column, []

    def watched(*arguments: Any) -> pa.Array:
        columns.append(naive(*arguments))
        return columns[-1]

    monkeypatch.setattr(strategies, "_naive_column", watched)
    run("surge-without-zero-copy", partitions(), LocalStore(tmp_path), hash_pool, BOUNDS)
    assert sum(map(len, columns)) == TEXTS


def test_packing_refuses_a_source_without_sizes(hash_pool: EncoderPool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sizes of all partitions before the first is read"):
        run("pb-pbp-lb", [partition_of("a", ROWS["a"])], LocalStore(tmp_path), hash_pool, BOUNDS)


class TestFirstFitDecreasing:
    @given(st.lists(st.integers(0, 40), max_size=60))
    def test_bins_hold_everything_once_and_more_than_the_capacity_only_alone(self, sizes: list[int]) -> None:
        bins = first_fit_decreasing(sizes, 25)
        assert sorted(place for packed in bins for place in packed) == list(range(len(sizes)))
        for packed in bins:
            filled = [sizes[place] for place in packed if sizes[place]]
            assert sum(filled) <= 25 or len(filled) == 1

    @given(st.lists(st.integers(1, 40), max_size=60))
    def test_each_size_goes_into_the_first_bin_with_room(self, sizes: list[int]) -> None:
        rooms: list[int] = []
        packed: list[list[int]] = []
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            size = min(sizes[place], 25)
            first = next((number for number, room in enumerate(rooms) if size <= room), len(rooms))
            if first == len(rooms):
                rooms.append(25)
                packed.append([])
            rooms[first] -= size
            packed[first].append(place)
        assert first_fit_decreasing(sizes, 25) == packed

    def test_compares_no_more_than_a_logarithm_of_the_bins_for_each_size(self) -> None:
        compared = 0

        class Counted(int):
            def __le__(self, other: int) -> bool:
                nonlocal compared
                compared += 1
                return int(self) <= other

        count = 4_096
        sizes = [Counted(20) for _ in range(count)]  # no two of them share a bin
        assert len(first_fit_decreasing(sizes, 25)) == count
        assert 0 < compared <= count * log2(count)


class TestMetering:
    def test_overlapping_spans_count_once(self) -> None:
        spans = union([(4.0, 5.0), (0.0, 1.0), (0.5, 2.0), (2.0, 3.0), (2.1, 2.5)])
        assert spans == [(0.0, 3.0), (4.0, 5.0)]
        assert covered(spans) == 4.0

    def test_shares_and_seconds_fit_together(self, outcomes: dict[str, Outcome]) -> None:
        for outcome in outcomes.values():
            assert outcome.duty == pytest.approx(outcome.encode_seconds / outcome.wall_seconds)
            assert 0 < outcome.encode_seconds + outcome.exposed_io_seconds <= outcome.wall_seconds * 1.001
            assert outcome.exposed_io_seconds <= outcome.io_seconds + 1e-9
        fixed = outcomes["fsb"]
        assert fixed.exposed_io_seconds == pytest.approx(fixed.io_seconds)  # all files follow the last call

    def test_calls_of_the_simulated_encoder_take_turns_after_their_pause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = pa.array(["a", "b"], pa.large_string())
        before: list[tuple[int, bool]] = []  # at each pause: calls that were begun, and whether all have ended
        begun: list[Any] = []
        pause_seconds, sleep, submit = 0.00123, time.sleep, EncoderPool.submit

        def pause(seconds: float) -> None:
            if seconds == pause_seconds:
                before.append((len(begun), all(call.result(0) is not None for call in begun)))
            sleep(seconds)

        def begin(*arguments: Any) -> Any:
            begun.append(submit(*arguments))
            return begun[-1]

        with (
            paced_pool(dimension=8, call_seconds=pause_seconds) as pool,
            pool.arena(slots=2, max_texts=2, max_bytes=8) as arena,
        ):
            slots = [arena.acquire(), arena.acquire()]
            for slot in slots:
                slot.append(texts)  # pyright: ignore[reportArgumentType]
            monkeypatch.setattr("benchmarks.paced_runs.time.sleep", pause)
            monkeypatch.setattr(EncoderPool, "submit", begin)
            calls = [pool.submit(slot) for slot in slots]
            for call, slot in zip(calls, slots, strict=True):
                metrics = call.result()
                assert metrics is not None
                assert metrics.costs.texts_computed == 2
                assert metrics.costs.encode_seconds >= pause_seconds
                assert np.linalg.norm(slot.matrix(0, 2), axis=1) == pytest.approx(np.ones(2))
        assert before == [(0, True), (1, True)]


@pytest.mark.soak
def test_case_runs_in_a_process_of_its_own() -> None:
    """Takes some 10 s: a process that imports everything and starts a pool."""
    case = Case(texts=3_000, partitions=7, workers=2, dimension=8, thresholds=Thresholds(b_min=500))
    outcome = measure("surge-async", case)
    assert (outcome.texts, outcome.partitions) == (3_000, 7)
    assert outcome.peak_rss_bytes > 0


@pytest.mark.soak
def test_baselines_of_sentence_transformers_write_the_vectors_of_the_product(tmp_path: Path) -> None:
    """Takes half a minute: both pools load a model."""
    spec = EncodingSpec(str(tiny_model("bert_cls", tmp_path / "model")))
    work = list(drawn_partitions([40, 3, 17]))
    with EncoderPool(spec, devices="cpu") as pool:
        run("surge-async", work, LocalStore(tmp_path / "surge"), pool, BOUNDS)
        space = pool.space
    encoder = SentenceTransformersTexts(spec.resolve())
    for name in BASELINES:
        run(name, work, LocalStore(tmp_path / name), encoder, BOUNDS)
        for partition in work:
            ours = read_embedded(tmp_path / "surge", space.name, partition.key)
            theirs = read_embedded(tmp_path / name, space.name, partition.key)
            assert (theirs.ids, theirs.texts) == (ours.ids, ours.texts)
            np.testing.assert_allclose(theirs.matrix, ours.matrix, atol=1e-5)
    encoder.close()
