"""Runs whose encoder is `surge-dagster serve` have the vectors of the service's space."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.endpoint.endpoint import Endpoint, json_fields
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store import open_store
from surge_dagster.service.spaces import LaneSettings, ServedSpaces
from tests.engine.runs import Output, in_memory
from tests.service.running import serving
from tests.small_catalogs import numbered_catalog

pytestmark = pytest.mark.processes


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """The URL of a service whose vectors are hashes of the texts."""
    store = open_store(tmp_path / "served")
    claim_space(store, EncodingSpec("hash://16").resolve())
    with ServedSpaces(store, LaneSettings("cpu")) as spaces:
        spaces.start()
        with serving(spaces) as url:
            yield url


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/documents/v1", {}), ("/v1", {"input_type": "document", "truncate": True})],
)
def test_run_has_the_vectors_of_the_service(
    service: str, tmp_path: Path, path: str, fields: dict[str, object]
) -> None:
    endpoint = Endpoint(url=service + path, fields=json_fields(fields), batch=100)
    catalog = numbered_catalog([700, 1, 0, 5])

    with EncoderPool(EncodingSpec("current", endpoint=endpoint)) as pool:
        output = Output(pool, tmp_path / "out")
        output.embed(in_memory(catalog))

    output.check_all(catalog)
