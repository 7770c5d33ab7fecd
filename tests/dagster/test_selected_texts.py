"""Catalogs of several text columns, and rows without a text, in Dagster."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from surge_dagster.resources import CatalogSource
from tests.dagster.conftest import Workbench, values_of
from tests.small_catalogs import assert_embedded


def test_refresh_embeds_the_template_and_reports_what_it_skipped(bench: Workbench) -> None:
    bench.settings |= {"text": "{id}: {text}", "missing_text": "skip"}
    bench.write("a", [("1", "one"), ("2", None)])
    ran = bench.refresh()
    assert ran.success, "the id is part of the template, so no text is missing"
    assert_embedded(bench.output, bench.space, "a", [("1", "1: one"), ("2", "2: ")])
    bench.settings["text"] = "{text}"
    ran = bench.refresh()
    assert ran.success, "the check of the published files knows of skipped rows"
    reported: dict[str, Any] = values_of(ran.materialized()["a"])
    assert (reported["rows"], reported["skipped_rows"], reported["blank_texts"]) == (1, 1, 0)
    assert ran.metrics()["skipped_rows"] == 1
    assert_embedded(bench.output, bench.space, "a", [("1", "one")])


def test_resource_takes_the_settings_and_refuses_a_template_that_cannot_be_used() -> None:
    given: dict[str, Any] = {
        "url": "/data/catalog",
        "id": "sku",
        "text": "{title}. {text}",
        "missing_text": "empty",
    }
    source = CatalogSource(**given)
    assert source.selection().columns == ["sku", "title", "text"]
    assert "`sku` identifies a row, `{title}. {text}` is embedded." in source.describe()
    given["text"] = "{title"
    with pytest.raises(ValidationError, match=r"the text template .* is not complete"):
        CatalogSource(**given)
