"""MiniLM compared with itself, with smaller vectors, and with a copy whose weights are shuffled: by
300 docstrings of numpy whose first lines are the queries."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from surge_dagster.engine.compare.comparison import compare
from surge_dagster.engine.compare.queries import Label, Query
from surge_dagster.engine.compare.report import Judged
from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import DerivedDtype, EncodingSpec, Space
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from tests.engine.runs import Output, in_memory
from tests.small_catalogs import Rows

pytestmark = pytest.mark.processes

QUERIES = 300
KEYS = ("a", "b", "c")


@dataclass(frozen=True)
class Compared:
    """An output with the spaces of two models, and queries with their relevant rows."""

    root: Path
    pools: dict[str, EncoderPool]
    mini: Space
    shuffled: Space
    queries: list[Query]

    @property
    def store(self) -> Store:
        return open_store(self.root)

    def pool(self, space: Space) -> AbstractContextManager[EncoderPool]:
        return nullcontext(self.pools[space.encoder_sha256])

    def derive(self, dtype: DerivedDtype, dimension: int | None = None) -> Space:
        run = DeriveRun(self.store, self.mini, dtype, dimension)
        assert not run.report.partitions_failed
        list(run.events())
        return run.space

    def judge(self, other: Space) -> Judged:
        """Compare MiniLM with another space."""
        judged = compare(self.store, self.mini, other, self.queries, self.pool).judged
        assert judged is not None
        return judged


def docstrings() -> tuple[dict[str, Rows], list[Query]]:
    """The docstrings of numpy in three partitions without their first lines, which are queries."""
    rows: dict[str, list[tuple[str, str]]] = {key: [] for key in KEYS}
    queries: dict[str, Query] = {}
    seen: set[str] = set()
    for name in sorted(np.__all__):
        summary, _, rest = (inspect.getdoc(getattr(np, name)) or "").partition("\n\n")
        text = rest[:200]
        read = " ".join(text.lower().split())
        if len(text) < 100 or read in seen:  # functions have aliases
            continue
        seen.add(read)
        key = KEYS[len(seen) % len(KEYS)]
        rows[key].append((name, text))
        if len(queries) < QUERIES:
            query = queries.setdefault(summary, Query(summary))
            query.labels[Label(key, name)] = len(queries) + 1
    return {key: list(of_key) for key, of_key in rows.items()}, list(queries.values())


def shuffle_weights(folder: Path, target: Path) -> Path:
    """Copy a model with the values of each tensor in another order."""
    shutil.copytree(folder, target)
    [path] = target.rglob("model.safetensors")
    draw = np.random.default_rng(0)
    weights = load_file(path)
    for name, values in weights.items():
        weights[name] = draw.permutation(values.ravel()).reshape(values.shape)
    save_file(weights, path, {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def made(
    model_pool: EncoderPool, demo_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compared]:
    folder = tmp_path_factory.mktemp("compared")
    spec = EncodingSpec(str(shuffle_weights(demo_folder, folder / "shuffled")))
    catalog, queries = docstrings()
    with EncoderPool(spec, devices="cpu", backend="torch") as other:
        spaces: list[Space] = []
        for pool in (model_pool, other):
            output = Output(pool, folder / "out")
            output.embed(in_memory(catalog))
            spaces.append(named_space(output.store, output.space))
        pools = {pool.space.spec_sha256: pool for pool in (model_pool, other)}
        mini, shuffled = spaces
        yield Compared(folder / "out", pools, mini, shuffled, queries)


def test_space_equals_itself_exactly(made: Compared) -> None:
    found = compare(made.store, made.mini, made.mini, made.queries, made.pool)

    assert found.overlap_at_10 == 1.0
    assert found.rank_correlation == 1.0
    assert found.judged is not None
    for metric in found.judged.metrics:
        assert metric.first > 0.4
        assert metric.difference == metric.low == metric.high == 0.0


def test_shuffled_weights_are_clearly_worse(made: Compared) -> None:
    judged = made.judge(made.shuffled)

    assert judged.verdict == "worse"
    assert judged.ndcg.high < -0.3
    assert judged.lost[0].difference < -0.5


def test_int8_and_float32_show_no_difference(made: Compared) -> None:
    judged = made.judge(made.derive("int8"))

    assert judged.verdict == f"no difference can be seen with {judged.queries} queries"
    assert abs(judged.ndcg.difference) < 0.01


def test_fewer_dimensions_are_worse(made: Compared) -> None:
    judged = made.judge(made.derive("float32", 128))

    assert judged.verdict == "worse"
    assert -0.2 < judged.ndcg.difference < -0.01


def test_bits_are_nearly_as_good_as_float32(made: Compared) -> None:
    judged = made.judge(made.derive("binary"))

    assert -0.05 < judged.ndcg.difference < 0.02
    assert judged.gained or judged.lost


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(lambda made: made.shuffled, id="another model"),
        pytest.param(lambda made: made.derive("float32", 128), id="128 dimensions"),
    ],
)
def test_metrics_are_those_of_a_search_with_numpy(
    made: Compared, second: Callable[[Compared], Space]
) -> None:
    other = second(made)
    judged = made.judge(other)

    for place, space in enumerate((made.mini, other)):
        expected = metrics_with_numpy(made, space)
        values = [(metric.first, metric.second)[place] for metric in judged.metrics]
        assert values == pytest.approx(expected.mean(0).tolist(), abs=1e-6)


def metrics_with_numpy(made: Compared, space: Space) -> np.ndarray:
    """Recall@10, MRR@10 and nDCG@10 of each query, by sorting all rows; texts are distinct."""
    names: list[tuple[str, str]] = []
    matrices: list[np.ndarray] = []
    for key in KEYS:
        table = pq.read_table(made.root / space.name / f"{key}.parquet")
        names += [(key, name) for name in table.column("id").to_pylist()]
        matrices.append(np.array(table.column("embedding").to_pylist(), np.float64))
    rows = np.concatenate(matrices)
    pool = made.pools[space.encoder_sha256]
    texts = pa.array([query.text for query in made.queries], pa.large_string())
    queries = pool.vectors(texts).astype(np.float64)[:, : rows.shape[1]]  # pyright: ignore[reportArgumentType]
    similarity = (queries @ rows.T) / np.linalg.norm(rows, axis=1)

    values: list[list[float]] = []
    for query, scores in zip(made.queries, similarity, strict=True):
        relevant = {(label.partition, label.id) for label in query.labels}
        best = [names[row] in relevant for row in np.argsort(-scores)[:10]]
        gain = sum(1 / np.log2(place + 2) for place, hit in enumerate(best) if hit)
        ideal = sum(1 / np.log2(place + 2) for place in range(min(10, len(relevant))))
        rank = best.index(True) + 1 if any(best) else np.inf
        values.append([sum(best) / len(relevant), 1 / rank, gain / ideal])
    return np.array(values)


def test_drawn_rows_need_no_model_for_a_derived_space(made: Compared) -> None:
    def no_pool(space: Space) -> AbstractContextManager[EncoderPool]:
        raise AssertionError("no model is needed")

    overlaps = {}
    for dtype in ("float16", "int8", "binary"):
        space = made.derive(dtype)
        overlaps[dtype] = compare(made.store, made.mini, space, 200, no_pool).overlap_at_10

    assert overlaps["float16"] > 0.99
    assert overlaps["int8"] > 0.97
    assert 0.5 < overlaps["binary"] < 0.95
