"""Typed contexts: the annotation of a handler says what its context is, and the worker converts it.

    @worker.stage("media.probe")
    async def probe(task: Task[Video]) -> Next: ...

msgspec reads dataclasses, TypedDicts, Structs and types of JSON. A type in which a pydantic model
occurs is read by pydantic. Neither is imported before a handler names such a type.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from penstock.contracts.context import not_finite
from penstock.errors import SettingsError
from penstock.worker.outcomes import Task

Reader = Callable[[Any], Any]


class InvalidContext(Exception):  # noqa: N818 (its name is the kind of the attempt's failure)
    """A context does not fit the type that its handler names."""


def reader_of(stage: str, handler: Callable[..., Any], names: Mapping[str, Any]) -> Reader | None:
    """Converts the contexts of a stage; None for a handler without a typed context.

    The reader raises `InvalidContext` for a context that does not fit.

    Args:
        stage: `type.stage`, for errors.
        handler: its first parameter may be annotated as `Task[…]`.
        names: local names where the handler is defined.

    Raises:
        SettingsError: the annotation cannot be resolved, or no context can have its type.
    """
    annotation = _annotation_of(handler)
    if annotation is None or (isinstance(annotation, str) and "[" not in annotation):
        return None
    try:
        hint = _resolve(annotation, handler, names)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        if isinstance(annotation, str) and "Task[" not in annotation:
            # An annotation of another kind, whose names only type checkers import.
            return None
        raise SettingsError(
            f"stage({stage!r}): the annotation {annotation!r} cannot be resolved: {error}; "
            "import its names at run time, not only for type checkers"
        ) from error
    if typing.get_origin(hint) is not Task:
        return None
    [wanted] = typing.get_args(hint)
    if wanted in (Any, object) or isinstance(wanted, typing.TypeVar):
        return None
    try:
        return _pydantic_reader(wanted) if _mentions_pydantic(wanted) else _msgspec_reader(wanted)
    except Exception as error:
        # Each library has errors of its own for types that it cannot read.
        raise SettingsError(f"stage({stage!r}): no context can be {_name_of(wanted)}: {error}") from error


def json_default(value: Any) -> Any:
    """The JSON value of an object that orjson does not know: of a Struct, a model or a path.

    Raises:
        TypeError: JSON cannot express it.
    """
    if isinstance(value, PurePath):
        return str(value)
    converted = value
    if hasattr(type(value), "__struct_fields__"):
        import msgspec  # noqa: PLC0415 (only where a Struct exists)

        converted = msgspec.to_builtins(value, enc_hook=json_default)
    elif hasattr(type(value), "__pydantic_validator__") and hasattr(value, "model_dump"):
        converted = value.model_dump(mode="json")
    if converted is value or not_finite(converted) is not None:
        raise TypeError(f"{type(value).__name__} is not JSON")
    return converted


def _annotation_of(handler: Callable[..., Any]) -> Any:
    """The annotation of the first parameter; None without one."""
    try:
        parameters = [*inspect.signature(handler).parameters.values()]
    except (TypeError, ValueError):
        return None
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return None
    return parameters[0].annotation


def _resolve(annotation: Any, handler: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    function: Any = handler
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        function = type(function).__call__
    function = getattr(function, "__func__", function)
    module = sys.modules.get(getattr(function, "__module__", ""))
    known = {**getattr(module, "__dict__", {}), **getattr(function, "__globals__", {})}
    holder = types.SimpleNamespace(__annotations__={"task": annotation})
    return typing.get_type_hints(holder, known, dict(names), include_extras=True)["task"]


def _mentions_pydantic(wanted: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Whether pydantic must read a type: a model, or a dataclass of pydantic, occurs in it."""
    if isinstance(wanted, type) and hasattr(wanted, "__pydantic_validator__"):
        return True
    parts = [*typing.get_args(wanted)]
    if (dataclasses.is_dataclass(wanted) or typing.is_typeddict(wanted)) and wanted not in seen:
        seen |= {wanted}
        parts += typing.get_type_hints(wanted).values()
    return any(_mentions_pydantic(each, seen) for each in parts)


def _msgspec_reader(wanted: Any) -> Reader:
    import msgspec  # noqa: PLC0415 (only where a handler has a typed context)

    kind = msgspec.inspect.type_info(wanted)
    if isinstance(kind, msgspec.inspect.CustomType) and not issubclass(kind.cls, PurePath):
        raise TypeError(
            "it is neither a dataclass, TypedDict, msgspec.Struct or pydantic model nor a type of JSON"
        )

    def other(kind: type[Any], value: Any) -> Any:
        if issubclass(kind, PurePath) and isinstance(value, str):
            return Path(value) if kind is PurePath else kind(value)
        if hasattr(kind, "__pydantic_validator__"):
            try:
                return _pydantic_reader(kind)(value)
            except InvalidContext as error:
                # msgspec adds the path to the model.
                raise ValueError(str(error)) from error
        raise TypeError(f"Cannot make `{kind.__name__}` of `{type(value).__name__}`")

    def read(value: Any) -> Any:
        if wanted is bytes and not isinstance(value, bytes):
            # msgspec would take text for base64.
            raise InvalidContext(
                f"the context does not fit bytes: Expected `bytes`, got `{type(value).__name__}`"
            )
        try:
            return msgspec.convert(value, wanted, dec_hook=other)
        except (msgspec.ValidationError, ValueError, RecursionError) as error:
            raise InvalidContext(f"the context does not fit {_name_of(wanted)}: {error}") from error

    return read


def _pydantic_reader(wanted: Any) -> Reader:
    import pydantic  # noqa: PLC0415 (only where a handler has a model)

    adapter = pydantic.TypeAdapter(wanted)

    def read(value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except pydantic.ValidationError as error:
            first, *others = error.errors(include_url=False, include_context=False, include_input=False)
            path = "$" + "".join(
                f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
            )
            more = f", and {len(others)} more" if others else ""
            raise InvalidContext(
                f"the context does not fit {_name_of(wanted)}: {first['msg']} - at `{path}`{more}"
            ) from error

    return read


def _name_of(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)
