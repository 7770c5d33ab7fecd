"""A run without work is reported without starting a worker, but not for a model whose content has changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.fresh_run import report_when_fresh
from surge_dagster.engine.store import open_store
from surge_dagster.engine.support.footer_memory import forget_all
from tests.engine.runs import finish, make_run
from tests.small_catalogs import DIMENSION, numbered_rows, partition_of

SPEC = EncodingSpec(model=f"hash://{DIMENSION}")


def test_run_without_work_is_reported_only_for_a_fresh_catalog_in_the_space_of_the_model(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = [partition_of(key, numbered_rows(key, 3)) for key in "ab"]
    store = open_store(tmp_path)
    assert report_when_fresh(catalog, store, SPEC) is None, "an output without a space"
    finish(make_run(hash_pool, catalog, tmp_path))
    report = report_when_fresh(catalog, store, SPEC)
    assert report and (report.partitions_skipped, report.texts_encoded) == (2, 0)
    assert (report.space, report.dimension) == (hash_pool.space.name, DIMENSION)
    for more in (partition_of("c", []), partition_of("b", [], version="v2")):
        assert report_when_fresh([*catalog, more], store, SPEC) is None
    assert report_when_fresh(catalog, store, EncodingSpec(model="hash://24")) is None
    changed = EncodingSpec(model="hash://24").resolve()
    monkeypatch.setattr(EncodingSpec, "resolve", lambda _: changed)
    assert report_when_fresh(catalog, store, SPEC) is None, "another model answers to the name"


def test_unreadable_file_starts_a_run_which_fails_only_its_partition(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = [partition_of(key, numbered_rows(key, 3)) for key in "ab"]
    finish(make_run(hash_pool, catalog, tmp_path))
    opened = os.open

    def bad_sector(name: Any, *arguments: Any, **options: Any) -> int:
        if str(name).endswith("/a.parquet"):
            raise OSError(errno.EIO, "Input/output error", name)
        return opened(name, *arguments, **options)

    monkeypatch.setattr(os, "open", bad_sector)
    forget_all()
    assert report_when_fresh(catalog, open_store(tmp_path), SPEC) is None
