"""The README and the pages under docs: what they name exists, and the first steps run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from surge_dagster import __all__ as public_names
from surge_dagster.engine.model.spec import EncodingSpec
from tests.pages import code_blocks
from tests.small_catalogs import write_partition

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
]
of_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
_NAMED_PATH = re.compile(
    r"`((?:surge_dagster|assets|resources|automation|tests|benchmarks|docs|deploy)/[\w./-]*)`"
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@of_pages
def test_every_path_and_link_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in _NAMED_PATH.findall(text) if not (ROOT / name).exists()]
    for link in _LINK.findall(text):
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)

    assert not missing


@of_pages
def test_page_imports_only_public_names(page: Path) -> None:
    for example in code_blocks(page.read_text(), "python"):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("surge_dagster"):
                assert node.module == "surge_dagster"
                for alias in node.names:
                    assert alias.name in public_names


@of_pages
def test_backfill_of_an_example_is_one_run(page: Path) -> None:
    for example in code_blocks(page.read_text(), "python"):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.Call):
                named = [keyword.arg for keyword in node.keywords]
                assert "partitions_def" not in named or "backfill_policy" in named


def test_first_steps_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    page = (ROOT / "docs" / "first-steps.md").read_text()
    [example] = [each for each in code_blocks(page, "python") if "EncodingSpec()" in each]
    write_partition(
        tmp_path / "data" / "catalog", "shoes", [("1", "waterproof boots"), ("2", "sandals")]
    )
    monkeypatch.chdir(tmp_path)
    exec(example.replace("EncodingSpec()", 'EncodingSpec("hash://8")'), {})

    published, _, verified, compared, *hits = capsys.readouterr().out.splitlines()

    assert published == "shoes 2"
    assert verified.startswith("Verified(key='shoes', rows=2")
    assert compared.startswith("Compared(vectors=2")
    assert hits[0].endswith(" shoes 1 waterproof boots")
    assert len(hits) == 2

    space = EncodingSpec("hash://8").resolve().name
    assert (tmp_path / "data" / "embeddings" / space / "shoes.parquet").is_file()
