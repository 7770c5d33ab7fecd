"""The OpenAPI document of the service, with the schemas of its requests and answers."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from surge_dagster.service.answers import EmbeddingList, Error, Model, ModelList
from surge_dagster.service.batch_lines import Batch, BatchRequest
from surge_dagster.service.files import MOST_LISTED, PURPOSES, FileObject
from surge_dagster.service.requests import EmbeddingRequest
from surge_dagster.version import __version__

_SCHEMAS = "#/components/schemas/{model}"
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_WHEN = {
    "Retry-After": {"description": "seconds after which another attempt is worth it", "schema": _NUMBER},
    "retry-after-ms": {"description": "the same in milliseconds", "schema": _NUMBER},
}
_OF_VECTORS = {
    "surge-space": {"description": "name of the space of the vectors", "schema": _TEXT},
    "surge-truncated-rows": {"description": "indexes of texts that were cut, if any, as 3,5-9", "schema": _TEXT},
}
_LISTED = {
    "after": _TEXT,
    "limit": _NUMBER | {"minimum": 1, "maximum": MOST_LISTED},
    "order": {"enum": ["asc", "desc"]},
}
_FORM = {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": PURPOSES}}
_UPLOAD = {"multipart/form-data": {"schema": {"type": "object", "properties": _FORM, "required": list(_FORM)}}}
_MODELS = (EmbeddingRequest, EmbeddingList, Model, ModelList, Error, FileObject, BatchRequest, Batch)


def openapi_document(*, needs_key: bool) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        needs_key: whether requests are answered only with an API key.
    """
    _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_SCHEMAS)  # pyright: ignore[reportArgumentType]
    paths: dict[str, Any] = {}
    for root, texts in (("/v1", "queries"), ("/documents/v1", "documents")):
        encode = _operation(f"encode texts as {texts}", EmbeddingList, sent=_content(EmbeddingRequest))
        encode["responses"]["200"]["headers"] = _OF_VECTORS
        make = _operation(f"make a batch, by default of {texts}", Batch, sent=_content(BatchRequest))
        upload = _operation("keep a file", FileObject, sent={"content": _UPLOAD})
        files = _operation("list files, the newest first", queries=_LISTED | {"purpose": _TEXT})
        of_root: dict[str, dict[str, Any]] = {
            "/embeddings": {"post": encode},
            "/models": {"get": _operation("list the spaces that are served", ModelList)},
            "/models/{model}": {"get": _operation("describe the space of this name or of this model", Model)},
            "/files": {"get": files, "post": upload},
            "/files/{id}": {"get": _operation("describe a file", FileObject), "delete": _operation("delete a file")},
            "/files/{id}/content": {"get": _operation("read a file", None, "application/octet-stream")},
            "/batches": {"get": _operation("list batches, the newest first", queries=_LISTED), "post": make},
            "/batches/{id}": {"get": _operation("describe a batch", Batch)},
            "/batches/{id}/cancel": {"post": _operation("end a batch", Batch)},
        }
        for path, item in of_root.items():
            paths[root + path] = item | _parameters("path", dict.fromkeys(re.findall("{(.*?)}", path), _TEXT))
    for path, meaning in (("/healthz", "whether queries can be encoded"), ("/readyz", "whether to send requests here")):
        paths[path] = {"get": _operation(meaning) | {"security": []}}
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


def _operation(
    summary: str,
    model: type[BaseModel] | None = None,
    media_type: str = "application/json",
    *,
    sent: dict[str, Any] | None = None,
    queries: dict[str, Any] | None = None,
) -> dict[str, Any]:
    refused = {"description": "refused, or failed", **_content(Error)}
    later = {"description": "not now", **_content(Error), "headers": _WHEN}
    done = {"description": "done", **_content(model, media_type)}
    return {
        "summary": summary,
        "responses": {"200": done, "429": later, "503": later, "4XX": refused, "5XX": refused},
        **_parameters("query", queries or {}),
        **({"requestBody": sent | {"required": True}} if sent else {}),
    }


def _parameters(place: str, schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        "parameters": [
            {"name": name, "in": place, "required": place == "path", "schema": schema}
            for name, schema in schemas.items()
        ]
    }


def _content(model: type[BaseModel] | None, media_type: str = "application/json") -> dict[str, Any]:
    schema = {"schema": {"$ref": _SCHEMAS.format(model=model.__name__)}} if model else {}
    return {"content": {media_type: schema}}
