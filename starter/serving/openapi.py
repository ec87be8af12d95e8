"""The API as an OpenAPI 3.1 document, whose schemas are the declarations in ``fields.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starter.base.strict_json import Record
from starter.base.version import __version__
from starter.serving.fields import body_schema


@dataclass(frozen=True)
class Operation:
    """A method and a path, with what is sent and in which form the answer comes."""

    method: str
    path: str
    summary: str
    body: Record | None = None
    content_type: str = "application/json"
    streams: bool = False  # where the body asks for it


OPEN = ("/health", "/")  # paths that need no key: they tell nothing of what is generated
ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"},
                   "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}}}


def openapi_document(operations: Sequence[Operation], needs_key: bool) -> dict[str, object]:
    """The document; ``needs_key``: all but /health ask for a bearer token."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": ERROR_SCHEMA}
    for operation in operations:
        entry: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation)}
        if operation.body is not None:
            name = operation.body.make.__name__
            schemas[name] = body_schema(operation.body)
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
            entry["requestBody"] = {"required": True, "content": content}
        if "{model}" in operation.path:
            entry["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        if needs_key and operation.path in OPEN:
            entry["security"] = []
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    document: dict[str, object] = {
        "openapi": "3.1.0", "info": {"title": "A mini LLM inference engine", "version": __version__}, "paths": paths,
        "components": {"schemas": schemas}}
    if needs_key:
        document["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        document["security"] = [{"key": []}]
    return document


def _responses(operation: Operation) -> dict[str, object]:
    content: dict[str, object] = {operation.content_type: {}}
    if operation.streams:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"200": {"description": "The answer.", "content": content},
            "default": {"description": "An error.", "content": error}}
