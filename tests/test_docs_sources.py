"""Each page under docs/sources has a configuration, and it gives the files of the rows that the
page is about."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest
import yaml

from surge_dagster.config.settings import load_settings
from surge_dagster.engine.model.spec import EncodingSpec
from tests.command import Command
from tests.engine.sources.tables import write_csv
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.pages import code_blocks
from tests.small_catalogs import Rows, assert_embedded, write_rows

PAGES = Path(__file__).parent.parent / "docs" / "sources"
CATALOG: dict[str, Rows] = {
    "shoes": [("1", "waterproof boots"), ("2", "sandals")],
    "hats": [("3", "a straw hat")],
}
NUMBERED: dict[str, Rows] = {
    "shoes": [(1, "waterproof boots"), (2, "sandals")],
    "hats": [(3, "a straw hat")],
}
GERMAN = {f"lang=de/category={key}": rows for key, rows in CATALOG.items()}
TABLE = [(*row, key) for key, rows in CATALOG.items() for row in rows]


def blocks(page: str, language: str) -> list[str]:
    """The configurations or programs of a page."""
    return code_blocks((PAGES / f"{page}.md").read_text(), language)


class Shell:
    """Runs `embed` with the settings of a page."""

    def __init__(self, run: Command) -> None:
        self.root = run.root
        self._run = run

    def embed(self, settings: Mapping[str, object]) -> None:
        (self.root / "surge.yaml").write_text(
            json.dumps({"output": "data/embeddings", "model": "hash://16", **settings})
        )
        code, _, error = self._run("embed")
        assert code == 0, error

    def assert_embedded(self, catalog: Mapping[str, Rows]) -> None:
        space = EncodingSpec("hash://16").resolve().name
        for key, rows in catalog.items():
            assert_embedded(self.root / "data" / "embeddings", space, key, rows)


@pytest.fixture
def shell(tmp_path: Path, surge: Command, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(surge)


def test_pages_of_all_kinds_are_listed() -> None:
    listed = (PAGES.parent / "sources.md").read_text()
    named = re.findall(r"\(sources/(\w+\.md)\)", listed)

    pages = [path.name for path in PAGES.iterdir()]
    assert sorted(set(named)) == sorted(pages)


def test_page_of_folders_embeds_its_rows(shell: Shell) -> None:
    [settings] = map(yaml.safe_load, blocks("folders", "yaml"))
    for key, rows in GERMAN.items():
        write_rows(shell.root / settings["source"] / key / "0.parquet", rows)
    shell.embed(settings)
    shell.assert_embedded(GERMAN)


def test_page_of_tables_embeds_its_rows(shell: Shell) -> None:
    [settings] = map(yaml.safe_load, blocks("tables", "yaml"))
    names = (settings["id"], settings["text"], "category", "lang")
    write_csv(shell.root / settings["source"], [(*row, "de") for row in TABLE], names)
    shell.embed(settings)
    shell.assert_embedded(GERMAN)


def test_page_of_buckets_embeds_its_rows(
    shell: Shell, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = blocks("buckets", "yaml")
    settings = yaml.safe_load(
        text.replace("my-bucket", BUCKET).replace("http://127.0.0.1:9000", object_server.url)
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    for key, rows in CATALOG.items():
        content = write_rows(shell.root / "x.parquet", rows).read_bytes()
        object_server.put(f"catalog/category={key}/0.parquet", content)
    shell.embed(settings)
    shell.assert_embedded(CATALOG)


def test_page_of_bigquery_embeds_its_rows(shell: Shell) -> None:
    from tests.engine.tables.bigquery_fake import TABLE as NAME
    from tests.engine.tables.bigquery_fake import FakeBigQuery

    whole, query = blocks("bigquery", "yaml")
    example = "my-project.shop.products"
    skus, titles, categories = map(list, zip(*TABLE, strict=True))
    described = ["new"] * len(TABLE)
    columns = {"sku": skus, "title": titles, "category": categories, "description": described}
    with FakeBigQuery(pa.table(columns)).serve_by_default():
        shell.embed(yaml.safe_load(whole.replace(example, NAME)) | {"output": "described"})
        shell.embed(yaml.safe_load(query.replace(example, NAME)))
    shell.assert_embedded(CATALOG)
    [space] = (shell.root / "described").glob("*/space.json")
    assert_embedded(
        shell.root / "described", space.parent.name, "hats", [("3", "a straw hat. new")]
    )


def test_page_of_frames_embeds_its_rows(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    [program] = blocks("frames", "python")
    for name in ("products", "hats"):
        write_csv(shell.root / f"{name}.csv", TABLE, ("sku", "title", "category"))
    monkeypatch.setenv("SURGE_MODEL", "hash://16")
    exec(program, {})

    shell.assert_embedded(NUMBERED)

    for key in CATALOG:
        assert list((shell.root / "data" / "by-key").glob(f"*/{key}.parquet"))


def test_page_of_assets_embeds_its_rows(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    [program] = blocks("assets", "python")

    [settings] = map(yaml.safe_load, blocks("assets", "yaml"))

    assert load_settings(**settings, output="x").partition_by == ["category"]

    write_csv(shell.root / "products.csv", TABLE)
    monkeypatch.setenv("SURGE_MODEL", "hash://16")
    names: dict[str, dg.Definitions] = {}
    exec(program.replace("https://shop.example/products.csv", "products.csv"), names)  # pyright: ignore[reportArgumentType]
    job = dg.Definitions.merge(
        names["defs"], dg.Definitions(executor=dg.in_process_executor)
    ).resolve_implicit_global_asset_job_def()
    keys = {
        "dagster/asset_partition_range_start": "hats",
        "dagster/asset_partition_range_end": "shoes",
    }
    with dg.DagsterInstance.ephemeral(str(shell.root)) as instance:
        instance.add_dynamic_partitions("catalog", sorted(CATALOG))
        for asset, tags in (("products", {}), ("embeddings", keys)):
            assert job.execute_in_process(
                instance=instance, asset_selection=[dg.AssetKey(asset)], tags=tags
            ).success
    shell.assert_embedded(NUMBERED)
