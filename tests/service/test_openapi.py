"""The OpenAPI document is valid and is what the service does, for any request."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from surge_dagster.service.server import ServiceSettings, service_app
from tests.extras import require
from tests.service.fake_spaces import FakeSpace, FakeSpaces


class AnyName(FakeSpaces):
    """Answers to every name, so that requests get further than to its check."""

    def find(self, model: str) -> FakeSpace:
        return self.only


def test_answers_to_any_request_are_as_the_document_says(
    tmp_path: Path,
) -> None:
    require("dev", "schemathesis")
    import schemathesis
    from schemathesis.specs.openapi.checks import (
        negative_data_rejection,
        positive_data_acceptance,
    )

    chosen = ServiceSettings(batches=tmp_path, uds=tmp_path / "any name of the host")
    app = service_app(AnyName().as_served(), chosen)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    statuses = Counter[tuple[str, int]]()
    for found in schema.get_all_operations():
        operation: Any = found.ok()  # pyright: ignore[reportAttributeAccessIssue]
        for mode in schemathesis.GenerationMode:
            if not operation.body and mode is schemathesis.GenerationMode.NEGATIVE:
                continue

            @seed(1)
            @settings(
                max_examples=10,
                phases=[Phase.generate],
                suppress_health_check=[HealthCheck.too_slow],
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                answer = case.call()
                # Which dimensions a space has is not in the document.
                excluded: list[Any] = [positive_data_acceptance]
                if case.operation.label.endswith("/files"):
                    excluded.append(negative_data_rejection)  # a part of a form has no type
                case.validate_response(answer, excluded_checks=excluded)
                statuses[case.operation.label, answer.status_code] += 1

            check()
    assert all(status < 500 for _, status in statuses)
    assert {("POST /v1/files", 200), ("POST /v1/batches", 404)} <= set(statuses)
    assert {("POST /v1/embeddings", 200), ("POST /v1/embeddings", 400)} <= set(statuses)


def document(**settings: Any) -> dict[str, Any]:
    return service_app(FakeSpaces().as_served(), ServiceSettings(**settings)).openapi()


@pytest.mark.parametrize("path", ["/v1/files", "/documents/v1/batches"])
def test_document_names_the_query_parameters(path: str, tmp_path: Path) -> None:
    parameters = document(batches=tmp_path)["paths"][path]["get"]["parameters"]
    assert {"after", "limit", "order"} <= {each["name"] for each in parameters}


@pytest.mark.parametrize("has_keys", [False, True])
def test_document_asks_for_a_key_where_the_service_does(has_keys: bool, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0" * 64)
    paths = document(api_keys=keys if has_keys else None)["paths"]
    assert ("security" in paths["/v1/embeddings"]["post"]) == has_keys
    assert "security" not in paths["/healthz"]["get"]
