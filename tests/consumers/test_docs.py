"""The configurations and programs of docs/consumers.md run as they stand, in a fresh folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from surge_dagster import changes, embed, embedding_catalog
from surge_dagster.config.settings import load_settings
from tests.pages import code_blocks
from tests.small_catalogs import numbered_rows, write_catalog

CATALOG = "data/catalog"
OUTPUT = "data/embeddings"
PAGE = (Path(__file__).parents[2] / "docs" / "consumers.md").read_text()


def run(program: str, names: dict[str, Any]) -> None:
    exec(compile(program, "docs/consumers.md", "exec", dont_inherit=True), names)


@pytest.fixture(autouse=True)
def catalog_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has a catalog of two partitions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SURGE_MODEL", "hash://16")
    rows = {"a": numbered_rows("a", 3), "b": numbered_rows("b", 2)}
    write_catalog(tmp_path / "data" / "catalog", rows)


def test_asset_of_the_page_gets_the_changes(tmp_path: Path) -> None:
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    catalog, _, asset = code_blocks(PAGE, "python")
    batches: list[Any] = []
    names: dict[str, Any] = {
        "embedding_catalog": embedding_catalog,
        "apply_to_your_index": batches.append,
    }
    run(f"shop = {catalog}", names)
    run(asset, names)
    index = names["search_index"]
    job = dg.define_asset_job("mine", selection=dg.AssetSelection.assets(index))
    added = dg.Definitions(assets=[index], jobs=[job], executor=dg.in_process_executor)
    definitions = dg.Definitions.merge(names["shop"], added)

    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        for name in ("catalog_refresh", "hand_over", "mine"):
            assert definitions.resolve_job_def(name).execute_in_process(instance=instance).success

    assert [len(batch) for batch in batches] == [1, 3, 1, 2]


def test_program_of_the_page_confirms_what_it_has_applied() -> None:
    embed(CATALOG, OUTPUT, changes=True)
    _, loop, _ = code_blocks(PAGE, "python")
    batches: list[Any] = []
    emptied: list[bool] = []
    names: dict[str, Any] = {
        "apply_to_your_index": batches.append,
        "empty_your_index": lambda: emptied.append(True),
    }

    run(loop, names)
    run(loop, names)

    assert [len(batch) for batch in batches] == [1, 3, 1, 2]
    assert emptied == [True]


@pytest.mark.parametrize(
    ("table", "package"),
    [("lancedb", "lancedb"), ("pgvector", "pgvector"), ("qdrant", "qdrant_client")],
)
def test_table_of_the_page_has_the_rows_of_the_files(
    table: str, package: str, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip(package, reason=f"not installed: the extra '{table}'")
    embed(CATALOG, OUTPUT)
    page = PAGE.replace("http://127.0.0.1:6333", "data/qdrant")
    [text] = [block for block in code_blocks(page, "yaml") if block.startswith(table)]
    given = yaml.safe_load(text)
    if table == "pgvector":
        given[table]["dsn"] = request.getfixturevalue("new_database")()
    settings = load_settings(output=OUTPUT, **given)

    target = getattr(settings, table).target()
    done = target.apply(partial(changes, OUTPUT, "shop"))

    assert done.rows_sent == 5
    assert target.counts() == {"a": 3, "b": 2}
