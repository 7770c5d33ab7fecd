"""The OpenAPI document of the service, with the schemas of its requests and answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from surge_dagster.service.answers import EmbeddingList, Error, Model, ModelList
from surge_dagster.service.requests import EmbeddingRequest
from surge_dagster.version import __version__

_SCHEMAS = "#/components/schemas/{model}"
_HEADERS = {
    "surge-space": "name of the space of the vectors",
    "surge-truncated-rows": "indexes of the texts that were cut, where there are any",
}


def openapi_document(*, needs_key: bool) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        needs_key: whether requests are answered only with an API key.
    """
    models = [(model, "validation") for model in (EmbeddingRequest, EmbeddingList, Model, ModelList, Error)]
    _, schemas = models_json_schema(models, ref_template=_SCHEMAS)  # pyright: ignore[reportArgumentType]
    paths: dict[str, Any] = {}
    for root, texts in (("/v1", "queries"), ("/documents/v1", "documents")):
        encode = _operation(f"encode texts as {texts}", EmbeddingList) | {"requestBody": _content(EmbeddingRequest)}
        encode["requestBody"]["required"] = True
        encode["responses"]["200"]["headers"] = {
            name: {"description": meaning, "schema": {"type": "string"}} for name, meaning in _HEADERS.items()
        }
        paths[f"{root}/embeddings"] = {"post": encode}
        paths[f"{root}/models"] = {"get": _operation("list the spaces that are served", ModelList)}
        named = _operation("describe the space of this name or of this model", Model)
        named["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[f"{root}/models/{{model}}"] = {"get": named}
    for path, meaning in (("/healthz", "whether queries can be encoded"), ("/readyz", "whether to send requests here")):
        paths[path] = {"get": _operation(meaning, None) | {"security": []}}
    paths["/metrics"] = {"get": _operation("metrics of Prometheus", None, "text/plain")}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "surge-dagster", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(summary: str, model: type[BaseModel] | None, media_type: str = "application/json") -> dict[str, Any]:
    refused = {"description": "refused, or failed; 429 and 503 say when to come back", **_content(Error)}
    done = {"description": "done", **_content(model, media_type)}
    return {"summary": summary, "responses": {"200": done, "4XX": refused, "5XX": refused}}


def _content(model: type[BaseModel] | None, media_type: str = "application/json") -> dict[str, Any]:
    schema = {"schema": {"$ref": _SCHEMAS.format(model=model.__name__)}} if model else {}
    return {"content": {media_type: schema}}
