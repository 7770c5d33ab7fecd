"""The memory plan of a run: how a limit is divided, and how thresholds are fitted to it."""

from __future__ import annotations

import heapq
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.parquet import STRING_COPIES, piece_bytes
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.run import embedding_run as run
from surge_dagster.engine.run.memory import SLOTS, MemoryPlan, ResultMemory, fit_memory, plan_memory
from surge_dagster.engine.run.thresholds import Bounds, Thresholds
from tests.engine.runs import Output, smallest_limit
from tests.small_catalogs import DIMENSION, numbered_rows, partition_of

SPACE = EncodingSpec(model=f"hash://{DIMENSION}").resolve()
RESULT = ResultMemory(DIMENSION, 4, 8, 0)


class TestPlan:
    BOUNDS = Bounds(100, 1000, 100_000, 1_000_000)

    def test_limit_that_is_too_small_names_the_smallest_that_works(self) -> None:
        least = smallest_limit(lambda limit: plan_memory(self.BOUNDS, RESULT, limit))
        assert plan_memory(self.BOUNDS, RESULT, least).limit == least
        with pytest.raises(ConfigError):
            plan_memory(self.BOUNDS, RESULT, least - 1)

    @given(
        st.lists(st.lists(st.integers(0, 200), max_size=30), min_size=1, max_size=12),
        st.integers(1, 9),
        st.sampled_from([1, 16, 384, 4096]),
        st.sampled_from(["float32", "float16"]),
    )
    def test_plan_covers_concurrent_writing_of_the_largest_partitions(
        self, partitions: list[list[int]], threads: int, dimension: int, dtype: str
    ) -> None:
        itemsize = np.dtype(dtype).itemsize
        memory = ResultMemory(dimension, itemsize, threads, 0)
        # as many bytes of ids as of texts
        texts = sum(map(len, partitions))
        held = 2 * sum(map(sum, partitions))
        bounds = Bounds(1, max(1, texts), 1, max(1, held))
        least = smallest_limit(lambda limit: plan_memory(bounds, memory, limit))
        plan = plan_memory(bounds, memory, least)
        result = memory.of_rows(texts, held)
        books = piece_bytes(0, dimension, itemsize)
        written = (
            max(piece_bytes(len(sizes), dimension, itemsize), books + STRING_COPIES * sum(sizes))
            for sizes in partitions
        )
        assert texts * dimension * itemsize + sum(heapq.nlargest(threads, written)) <= result
        assert plan.reader + 2 * held + result < least


class TestFit:
    """How thresholds follow from the memory."""

    GIB = 1024**3
    WIDE = EncodingSpec(model="hash://4096").resolve()

    def fit(
        self,
        thresholds: Thresholds,
        derived_b_min: int = 1_000_000,
        space: Space = WIDE,
        limit: int | None = None,
        machine: int = GIB,
        upload_bytes: int = 0,
    ) -> tuple[Bounds, MemoryPlan]:
        return fit_memory(
            thresholds,
            derived_b_min,
            space,
            8,
            limit,
            machine_bytes=machine,
            upload_bytes=upload_bytes,
        )

    def test_thresholds_stay_if_three_superbatches_fit_half_the_machine(self) -> None:
        bounds, plan = self.fit(Thresholds(), 20_000, SPACE, machine=64 * self.GIB)

        assert bounds == Thresholds().resolve(20_000)
        assert plan == plan_memory(bounds, RESULT, 32 * self.GIB)

    @pytest.mark.parametrize("upload_bytes", [0, 48 * 1024 * 1024])
    @pytest.mark.parametrize("derived_b_min", [1_000, 2_000, 1_000_000])
    @pytest.mark.parametrize("machine", [GIB // 2, GIB, 4 * GIB, 25 * GIB])
    @pytest.mark.parametrize("space", [SPACE, WIDE], ids=["narrow", "wide"])
    def test_derived_thresholds_shrink_until_they_fit_half_the_machine(
        self, space: Space, machine: int, derived_b_min: int, upload_bytes: int
    ) -> None:
        bounds, plan = self.fit(
            Thresholds(), derived_b_min, space, machine=machine, upload_bytes=upload_bytes
        )

        three = SLOTS * plan.result.of_superbatch(bounds)
        assert plan.limit == machine // 2
        assert 1 <= bounds.b_min <= bounds.b_max <= Thresholds().resolve(derived_b_min).b_max
        assert bounds.b_max_bytes > 4 * 1024 * 1024, "a text of the usual maximum still fits"
        if machine >= 4 * self.GIB:
            assert plan.reader + three <= plan.limit

    @pytest.mark.parametrize("upload_bytes", [0, 48 * 1024 * 1024])
    @pytest.mark.parametrize("derived_b_min", [1_000, 20_000])
    def test_more_memory_makes_no_superbatch_smaller(
        self, derived_b_min: int, upload_bytes: int
    ) -> None:
        largest = 0
        for machine in range(self.GIB // 2, 4 * self.GIB, self.GIB // 16):
            bounds, _ = self.fit(
                Thresholds(), derived_b_min, SPACE, machine=machine, upload_bytes=upload_bytes
            )
            assert bounds.b_max >= largest, machine
            largest = bounds.b_max

    def test_example_in_the_documentation_is_true(self) -> None:
        space = EncodingSpec(model="hash://384").resolve()

        bounds, _ = fit_memory(Thresholds(), 50_000, space, 4, None, machine_bytes=2 * self.GIB)

        assert bounds.b_max == 59_081

    def test_given_thresholds_stay_and_derived_ones_shrink(self) -> None:
        requested = Thresholds(b_min=20_000)
        bounds, plan = self.fit(requested, machine=4 * self.GIB)
        assert 20_000 == bounds.b_min <= bounds.b_max < requested.resolve(1_000_000).b_max
        assert plan.limit <= 2 * self.GIB

    def test_one_superbatch_is_enough_where_three_of_the_given_size_do_not_fit(self) -> None:
        requested = Thresholds(b_max=400_000)
        bounds, plan = self.fit(requested, machine=25 * self.GIB)
        assert bounds == requested.resolve(1_000_000)
        assert plan.limit == 25 * self.GIB // 2

    @pytest.mark.parametrize(
        "requested",
        [
            Thresholds(b_max=500_000),
            Thresholds(b_min=400_000),
            Thresholds(b_min=1_000, b_max=500_000),
            Thresholds(max_text_bytes=10**11),
        ],
    )
    def test_thresholds_that_do_not_fit_are_refused_with_a_limit_that_works(
        self, requested: Thresholds
    ) -> None:
        def fit(thresholds: Thresholds, limit: int | None = None) -> int:
            return self.fit(thresholds, limit=limit, machine=8 * self.GIB)[1].limit

        with pytest.raises(ConfigError, match="half of this machine's or container's") as error:
            fit(requested)
        found = re.search(r"the smallest that works is ([\d,]+)", str(error.value))
        assert found
        least = int(found[1].replace(",", ""))
        assert fit(requested, least) == least

    def test_configured_limit_is_not_compared_with_the_machine(self) -> None:
        bounds, plan = self.fit(Thresholds(), 100_000, limit=40 * self.GIB)
        assert bounds == Thresholds().resolve(100_000)
        assert plan.limit == 40 * self.GIB

    def test_derived_thresholds_grow_with_the_limit_and_with_the_longest_text(self) -> None:
        mib = 1024 * 1024

        def b_max_bytes(limit: int, max_text_bytes: int = 4 * mib) -> int:
            thresholds = Thresholds(max_text_bytes=max_text_bytes)
            bounds, plan = self.fit(thresholds, limit=limit)
            assert plan.limit == limit
            assert bounds.b_max_bytes > 2 * max_text_bytes
            return bounds.b_max_bytes

        assert b_max_bytes(self.GIB // 4) < b_max_bytes(16 * self.GIB)
        assert b_max_bytes(4 * self.GIB, 128 * mib) >= 256 * mib
        with pytest.raises(ConfigError, match=r"lower b_max .* or max_text_bytes"):
            b_max_bytes(self.GIB // 4, 128 * mib)

    @pytest.mark.parametrize("times", [1.0, 1.01, 1.3, 3.0])
    @pytest.mark.parametrize("beyond", [1, 100_000_000, 5 * GIB])
    @pytest.mark.parametrize("ids", [0, 8_000_000, GIB])
    @pytest.mark.parametrize(
        "requested",
        [Thresholds(), Thresholds(b_max=200_000), Thresholds(max_text_bytes=500_000_000)],
    )
    def test_limit_for_pages_and_ids_works_whatever_the_thresholds_do(
        self, requested: Thresholds, ids: int, beyond: int, times: float
    ) -> None:
        def fit(limit: int) -> MemoryPlan:
            return self.fit(requested, space=SPACE, limit=limit)[1]

        plan = fit(int(times * smallest_limit(fit)))
        size = plan.pages + beyond
        raised = fit(plan.limit_for(size + ids))
        assert size <= raised.pages
        assert ids <= raised.source - (size - raised.reader_pages)

    def test_run_plans_with_the_memory_of_the_machine(
        self, output: Output, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run, "memory_bytes", lambda: self.GIB)
        small = output.embed([partition_of("p", numbered_rows("p", 3))], Thresholds())
        assert output.keys() == {"p"}
        assert small.memory.plan.limit <= self.GIB // 2
