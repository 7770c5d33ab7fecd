"""The command line on catalogs whose texts are put together from columns."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.test_cli import MODEL, in_process


def write_products(catalog: Path, key: str, **columns: object) -> None:
    path = catalog / f"partition={key}" / "part-0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table(columns), path)


def test_template_is_embedded_searched_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_products(tmp_path / "catalog", "shoes", sku=[1, 2], title=["Boot", "Clog"], price=[99.5, 20.0])
    given = (*MODEL, "--id", "sku", "--text", "{title} for {price} {{EUR}}", "--json")
    code, _, error = in_process(capsys, monkeypatch, tmp_path, "embed", "catalog", "out", *given)
    assert code == 0, error
    code, out, _ = in_process(capsys, monkeypatch, tmp_path, "search", "out", "Clog for 20 {EUR}", *MODEL, "--json")
    first = json.loads(out.strip().splitlines()[-1])["hits"][0]
    assert code == 0 and (first["id"], first["text"]) == ("2", "Clog for 20 {EUR}")
    code, out, _ = in_process(capsys, monkeypatch, tmp_path, "verify", "catalog", "out", *given)
    assert code == 0 and json.loads(out.strip().splitlines()[-1])["violations"] == []


def test_template_that_cannot_be_used_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_products(tmp_path / "catalog", "shoes", id=["1"], text=["Boot"])
    code, _, error = in_process(capsys, monkeypatch, tmp_path, "embed", "catalog", "out", *MODEL, "--text", "{title")
    assert code == 2 and "error: setting text is '{title': the text template '{title' is not complete" in error


def test_rows_without_a_text_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_products(tmp_path / "catalog", "shoes", id=["1", "2", "3"], text=["Boot", None, " "])
    given = (*MODEL, "--missing-text", "skip", "--json")
    code, out, error = in_process(capsys, monkeypatch, tmp_path, "embed", "catalog", "out", *given)
    assert code == 0, error
    report = json.loads(out.strip().splitlines()[-1])
    assert (report["texts_encoded"], report["skipped_rows"], report["blank_texts"]) == (1, 2, 0)
    code, out, _ = in_process(capsys, monkeypatch, tmp_path, "verify", "catalog", "out", *given)
    assert code == 0 and json.loads(out.strip().splitlines()[-1])["violations"] == []


def test_search_without_a_text_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    for output in ("out", "s3://bucket/vectors"):
        code, _, error = in_process(capsys, monkeypatch, tmp_path, "search", output, *MODEL)
        assert code == 2 and f"the text to search for is missing: surge-dagster search {output} TEXT" in error


def test_column_that_divides_twice_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("id,text,category\n1,x,a\n")
    given = ("embed", "t.csv", "out", *MODEL, "--partition-by", "category,category")
    code, _, error = in_process(capsys, monkeypatch, tmp_path, *given)
    assert code == 2 and "setting partition_by is 'category,category': expected each column once" in error


def test_errors_are_the_json_document_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, error = in_process(capsys, monkeypatch, tmp_path, "embed", "nowhere", "out", *MODEL, "--json")
    assert code == 2 and error == f"error: {json.loads(out)['error']}\n" and "nowhere" in error


def test_table_without_rows_is_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("id,text,category\n")
    given = ("embed", "t.csv", "out", *MODEL, "--partition-by", "category")
    code, _, error = in_process(capsys, monkeypatch, tmp_path, *given)
    assert code == 0 and "the source 't.csv' has no rows, and so no partitions" in error


def test_further_columns_are_carried_into_the_output_and_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_products(tmp_path / "catalog", "shoes", id=["1"], text=["Boot"], price=[99.5], sku=["b-1"])
    given = (*MODEL, "--columns", "sku,price", "--json")
    code, _, error = in_process(capsys, monkeypatch, tmp_path, "embed", "catalog", "out", *given)
    assert code == 0, error
    code, out, _ = in_process(capsys, monkeypatch, tmp_path, "search", "out", "Boot", *MODEL, "--json")
    [hit] = json.loads(out.strip().splitlines()[-1])["hits"]
    assert code == 0 and hit["columns"] == {"sku": "b-1", "price": 99.5}
    for wanted in (given, ("--json",)):  # without settings, those that the output recorded
        code, out, _ = in_process(capsys, monkeypatch, tmp_path, "verify", "catalog", "out", *wanted)
        assert code == 0 and json.loads(out.strip().splitlines()[-1])["violations"] == []
    code, _, error = in_process(capsys, monkeypatch, tmp_path, "embed", "catalog", "out", *MODEL, "--columns", "text")
    assert code == 2 and "the column 'text' cannot be carried" in error
