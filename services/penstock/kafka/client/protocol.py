"""Requests of Kafka's protocol that the client library lacks."""

from __future__ import annotations

from typing import Any

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Schema


def struct(
    api_key: int, version: int, request: Schema, answer: Schema, *, flexible: bool = False
) -> type[RequestStruct]:
    """The layout of one version of a request and of its answer.

    Args:
        api_key: Kafka's number of the request.
        version: of the layout.
        request: the fields of the request.
        answer: the fields of the answer.
        flexible: whether the version has tagged fields.
    """
    of_both = {"API_KEY": api_key, "API_VERSION": version}
    answered = type("Answer", (Response,), {**of_both, "SCHEMA": answer})
    fields = {**of_both, "SCHEMA": request, "RESPONSE_TYPE": answered, "FLEXIBLE_VERSION": flexible}
    return type("Struct", (RequestStruct,), fields)


class RequestOf(Request[RequestStruct]):  # type: ignore[misc]  # aiokafka is untyped
    """A request in the only version that this process sends.

    Args:
        layout: of the request.
        values: of its fields.
    """

    API_KEY = -1

    def __init__(self, layout: type[RequestStruct], *values: Any) -> None:
        self.API_KEY = layout.API_KEY
        self._CLASSES = (layout,)
        self._values = values

    def build(self, request_struct_class: type[RequestStruct]) -> RequestStruct:
        """The request; called by the client."""
        return request_struct_class(*self._values)
