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
_WHEN = {
    "Retry-After": ("integer", "seconds after which another attempt is worth it"),
    "retry-after-ms": ("integer", "the same in milliseconds"),
}
_OF_VECTORS = {
    "surge-space": ("string", "name of the space of the vectors"),
    "surge-truncated-rows": ("string", "indexes of the texts that were cut, where there are any"),
}
_TEXT = {"type": "string"}
_LISTED: dict[str, Any] = {
    "after": _TEXT,
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED},
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
        encode["responses"]["200"] |= _headers(_OF_VECTORS)
        make = _operation(f"make a batch, by default of {texts}", Batch, sent=_content(BatchRequest))
        upload = _operation("keep a file", FileObject, sent={"content": _UPLOAD})
        purpose = {"purpose": _TEXT}
        content = _operation("read a file", None, "application/octet-stream")
        of_root: dict[str, dict[str, Any]] = {
            "/embeddings": {"post": encode},
            "/models": {"get": _operation("list the spaces that are served", ModelList)},
            "/models/{model}": {"get": _operation("describe the space of this name or of this model", Model)},
            "/files": {"get": _operation("list files, the newest first", queries=_LISTED | purpose), "post": upload},
            "/files/{id}": {
                "get": _operation("describe a file", FileObject),
                "delete": _operation("delete a file"),
            },
            "/files/{id}/content": {"get": content},
            "/batches": {"get": _operation("list batches, the newest first", queries=_LISTED), "post": make},
            "/batches/{id}": {"get": _operation("describe a batch", Batch)},
            "/batches/{id}/cancel": {"post": _operation("end a batch", Batch)},
        }
        for path, item in of_root.items():
            names = re.findall("{(.*?)}", path)
            paths[root + path] = item | (
                {"parameters": _parameters("path", dict.fromkeys(names, _TEXT))} if names else {}
            )
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
    later = {"description": "not now", **_content(Error), **_headers(_WHEN)}
    responses = {"200": {"description": "done", **_content(model, media_type)}, "4XX": refused, "5XX": refused}
    operation: dict[str, Any] = {"summary": summary, "responses": responses | {"429": later, "503": later}}
    if sent is not None:
        operation["requestBody"] = sent | {"required": True}
    if queries is not None:
        operation["parameters"] = _parameters("query", queries)
    return operation


def _parameters(place: str, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    is_needed = place == "path"
    return [{"name": name, "in": place, "required": is_needed, "schema": schema} for name, schema in schemas.items()]


def _headers(meanings: dict[str, tuple[str, str]]) -> dict[str, Any]:
    described = {name: {"description": text, "schema": {"type": kind}} for name, (kind, text) in meanings.items()}
    return {"headers": described}


def _content(model: type[BaseModel] | None, media_type: str = "application/json") -> dict[str, Any]:
    schema = {"schema": {"$ref": _SCHEMAS.format(model=model.__name__)}} if model else {}
    return {"content": {media_type: schema}}
