"""The configurations and programs of docs/consumers.md run as they stand, in a fresh folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from surge_dagster import changes, embedding_catalog
from surge_dagster.config.settings import Settings, load_settings
from tests.pages import code_blocks
from tests.small_catalogs import numbered_rows, write_catalog

PAGE = (Path(__file__).parents[2] / "docs" / "consumers.md").read_text()


def run(program: str, names: dict[str, Any]) -> None:
    exec(compile(program, "docs/consumers.md", "exec", dont_inherit=True), names)


def test_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_database: Callable[[], str]
) -> None:
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    pytest.importorskip("qdrant_client", reason="not installed: the extra 'qdrant'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SURGE_MODEL", "hash://16")
    write_catalog(
        tmp_path / "data" / "catalog", {"a": numbered_rows("a", 3), "b": numbered_rows("b", 2)}
    )
    catalog, loop, asset = code_blocks(PAGE, "python")
    batches: list[Any] = []
    names: dict[str, Any] = {
        "embedding_catalog": embedding_catalog,
        "apply_to_your_index": batches.append,
    }
    run(f"shop = {catalog}", names)
    run(asset, names)
    job = dg.define_asset_job("mine", selection=dg.AssetSelection.assets(names["search_index"]))
    added = dg.Definitions(
        assets=[names["search_index"]], jobs=[job], executor=dg.in_process_executor
    )
    definitions = dg.Definitions.merge(names["shop"], added)
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        for name in ("catalog_refresh", "hand_over", "mine"):
            assert definitions.resolve_job_def(name).execute_in_process(instance=instance).success
    assert [len(batch) for batch in batches] == [1, 3, 1, 2]

    emptied = []
    run(loop, names | {"empty_your_index": lambda: emptied.append(True)})
    assert [len(batch) for batch in batches] == [1, 3, 1, 2] * 2
    assert emptied == [True]
    run(loop, names)
    assert len(batches) == 8, "it has confirmed"

    page = re.sub(r'"postgresql:.*?"', lambda _: f'"{new_database()}"', PAGE)
    for text in code_blocks(page.replace("http://127.0.0.1:6333", "data/qdrant"), "yaml"):
        settings: Settings = load_settings(output="data/embeddings", **yaml.safe_load(text))
        [target] = [
            table.target()
            for table in (settings.lancedb, settings.pgvector, settings.qdrant)
            if table is not None
        ]
        assert target.apply(partial(changes, "data/embeddings", target.place)).rows_sent == 5
        assert target.counts() == {"a": 3, "b": 2}
