"""Catalogs of several text columns, and rows without a text, in Dagster."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from surge_dagster.resources import CatalogSource


def test_resource_refuses_a_template_that_cannot_be_used() -> None:
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
