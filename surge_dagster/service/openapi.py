"""The OpenAPI document of the service, with the schemas of its requests and answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from surge_dagster.service.answers import EmbeddingList, Error, Model, ModelList
from surge_dagster.service.requests import EmbeddingRequest
from surge_dagster.version import __version__

_SCHEMAS = "#/components/schemas/{model}"
_TRUNCATED = {"surge-truncated-rows": "Indexes of the texts that were cut, with commas; only where there are any"}


def openapi_document(*, needs_key: bool) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        needs_key: whether requests are answered only with an API key.
    """
    models = [(model, "validation") for model in (EmbeddingRequest, EmbeddingList, Model, ModelList, Error)]
    _, schemas = models_json_schema(models, ref_template=_SCHEMAS)  # pyright: ignore[reportArgumentType]
    paths: dict[str, Any] = {}
    for root, texts in (("/v1", "queries"), ("/documents/v1", "documents")):
        paths[f"{root}/embeddings"] = {"post": _embeddings(texts)}
        paths[f"{root}/models"] = {"get": _answering("List the spaces that are served", ModelList)}
        by_name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        paths[f"{root}/models/{{model}}"] = {
            "get": _answering("Describe the space of this name, or of this model", Model) | {"parameters": [by_name]}
        }
    for path, meaning in (
        ("/healthz", "Whether every current space can be queried (200 or 503); needs no key"),
        ("/readyz", "Whether requests should be sent here (200 or 503); needs no key"),
    ):
        paths[path] = {"get": _answering(meaning, None) | {"security": []}}
    paths["/metrics"] = {"get": _answering("Metrics of Prometheus", None, "text/plain")}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "surge-dagster",
            "version": __version__,
            "description": "Vectors of queries and documents in the spaces of an output.",
        },
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _embeddings(texts: str) -> dict[str, Any]:
    body = {"required": True, "content": _content(EmbeddingRequest)}
    answering = _answering(f"Encode texts as {texts}", EmbeddingList)
    headers = {"surge-space": "Name of the space of the vectors", **_TRUNCATED}
    answering["responses"]["200"]["headers"] = {
        name: {"description": meaning, "schema": {"type": "string"}} for name, meaning in headers.items()
    }
    return answering | {"requestBody": body}


def _answering(summary: str, model: type[BaseModel] | None, media_type: str = "application/json") -> dict[str, Any]:
    success = {"description": "Done", "content": _content(model, media_type)}
    failures = {"4XX": "The request is refused", "5XX": "The service cannot answer; 503 says when to come back"}
    responses = {code: {"description": said, "content": _content(Error)} for code, said in failures.items()}
    return {"summary": summary, "responses": {"200": success, **responses}}


def _content(model: type[BaseModel] | None, media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": _SCHEMAS.format(model=model.__name__)}} if model else {}}
