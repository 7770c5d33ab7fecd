"""The OpenAPI document is valid and is what the service does, for any request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from surge_dagster.service.app import service_app
from surge_dagster.service.openapi import openapi_document
from surge_dagster.service.settings import ServiceSettings
from tests.extras import require
from tests.service.fake_spaces import FakeSpace, FakeSpaces


class AnyName(FakeSpaces):
    """Answers to every name, so that requests get further than to its check."""

    def find(self, model: str) -> FakeSpace:
        return self.only


def test_answers_are_as_the_document_says_and_no_request_makes_the_service_fail() -> None:
    require("dev", "schemathesis")
    import schemathesis
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_asgi("/openapi.json", service_app(AnyName().as_served(), ServiceSettings()))
    statuses = Counter[tuple[str, int]]()
    for found in schema.get_all_operations():
        operation: Any = found.ok()  # pyright: ignore[reportAttributeAccessIssue]
        for mode in schemathesis.GenerationMode:
            if operation.method == "get" and mode is schemathesis.GenerationMode.NEGATIVE:
                continue

            @seed(1)
            @settings(max_examples=10, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                answer = case.call()
                # Which dimensions a space has is not in the document.
                case.validate_response(answer, excluded_checks=[positive_data_acceptance])
                statuses[case.operation.label, answer.status_code] += 1

            check()
    assert all(status < 500 for _, status in statuses)
    assert {("POST /v1/embeddings", 200), ("POST /v1/embeddings", 400)} <= set(statuses)


def test_document_names_all_routes() -> None:
    app = service_app(FakeSpaces().as_served(), ServiceSettings())
    routes = {route.path.replace(":path", "") for route in app.routes}  # pyright: ignore[reportAttributeAccessIssue]
    assert set(openapi_document(needs_key=False)["paths"]) == routes - {"/openapi.json"}


@pytest.mark.parametrize("keys", [False, True])
def test_document_asks_for_a_key_where_the_service_does(keys: bool) -> None:
    document = openapi_document(needs_key=keys)
    assert ("security" in document) == keys
    assert document["paths"]["/healthz"]["get"]["security"] == []
