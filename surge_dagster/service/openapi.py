"""The OpenAPI document of the service, with the schemas of its requests and answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from surge_dagster.service.answers import EmbeddingList, Error, Model, ModelList
from surge_dagster.service.batch_lines import Batch, BatchRequest
from surge_dagster.service.files import PURPOSES, FileObject
from surge_dagster.service.requests import EmbeddingRequest
from surge_dagster.version import __version__

_SCHEMAS = "#/components/schemas/{model}"
_HEADERS = {
    "surge-space": "name of the space of the vectors",
    "surge-truncated-rows": "indexes of the texts that were cut, where there are any",
}
_FORM = {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": PURPOSES}}
_UPLOAD = {"multipart/form-data": {"schema": {"type": "object", "properties": _FORM, "required": list(_FORM)}}}


def openapi_document(*, needs_key: bool) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        needs_key: whether requests are answered only with an API key.
    """
    models = (EmbeddingRequest, EmbeddingList, Model, ModelList, Error, FileObject, BatchRequest, Batch)
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_SCHEMAS)  # pyright: ignore[reportArgumentType]
    paths: dict[str, Any] = {}
    for root, texts in (("/v1", "queries"), ("/documents/v1", "documents")):
        encode = _operation(f"encode texts as {texts}", EmbeddingList) | {"requestBody": _content(EmbeddingRequest)}
        encode["requestBody"]["required"] = True
        encode["responses"]["200"]["headers"] = {
            name: {"description": meaning, "schema": {"type": "string"}} for name, meaning in _HEADERS.items()
        }
        paths[f"{root}/embeddings"] = {"post": encode}
        paths[f"{root}/models"] = {"get": _operation("list the spaces that are served", ModelList)}
        described = _operation("describe the space of this name or of this model", Model)
        paths[f"{root}/models/{{model}}"] = {"get": described | _parameter("model")}
        upload = _operation("keep a file", FileObject) | {"requestBody": {"content": _UPLOAD, "required": True}}
        make = _operation(f"make a batch, by default of {texts}", Batch) | {"requestBody": _content(BatchRequest)}
        paths[f"{root}/files"] = {"get": _operation("list files, the newest first", None), "post": upload}
        paths[f"{root}/files/{{id}}"] = {
            "get": _operation("describe a file", FileObject),
            "delete": _operation("delete a file", None),
            **_parameter("id"),
        }
        content = _operation("read a file", None, "application/octet-stream")
        paths[f"{root}/files/{{id}}/content"] = {"get": content, **_parameter("id")}
        paths[f"{root}/batches"] = {"get": _operation("list batches, the newest first", None), "post": make}
        paths[f"{root}/batches/{{id}}"] = {"get": _operation("describe a batch", Batch), **_parameter("id")}
        paths[f"{root}/batches/{{id}}/cancel"] = {"post": _operation("end a batch", Batch), **_parameter("id")}
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


def _parameter(name: str) -> dict[str, Any]:
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def _operation(summary: str, model: type[BaseModel] | None, media_type: str = "application/json") -> dict[str, Any]:
    refused = {"description": "refused, or failed; 429 and 503 say when to come back", **_content(Error)}
    done = {"description": "done", **_content(model, media_type)}
    return {"summary": summary, "responses": {"200": done, "4XX": refused, "5XX": refused}}


def _content(model: type[BaseModel] | None, media_type: str = "application/json") -> dict[str, Any]:
    schema = {"schema": {"$ref": _SCHEMAS.format(model=model.__name__)}} if model else {}
    return {"content": {media_type: schema}}
