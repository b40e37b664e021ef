"""Checks the arguments of each method of `Client`, and of its drafts, by their annotations.

A wrong argument would otherwise be sent as something else, such as a text as a list of characters,
or fail in an encoder, without its name. Values that cannot be told apart by type alone are judged
by the gateway.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar, Union

from penstock.client.arguments import shown
from penstock.errors import InvalidRecord

C = TypeVar("C", bound=type)

_WORDS: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a text",
    datetime: "a datetime",
    types.NoneType: "None",
}


def checked(client: C) -> C:
    """Wraps the public methods of a class, also those that it inherits."""
    for name, method in inspect.getmembers(client, inspect.isfunction):
        if not name.startswith("_"):
            setattr(client, name, _checked(method))
    return client


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.cache
    def hints() -> Mapping[str, Any]:
        # At the first call: it evaluates texts.
        return typing.get_type_hints(method)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        by_name = hints()
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name != "self" and name in by_name:
                require(value, by_name[name], f"/{name}")

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            return await method(*args, **kwargs)

        return call

    @functools.wraps(method)
    def iterate(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return method(*args, **kwargs)

    return iterate


@functools.cache
def _field_hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def require_fields(draft: Any) -> None:
    """Requires fields of a dataclass that their annotations allow.

    Raises:
        InvalidRecord: a field has another value; `pointer` is the field.
    """
    kind: Any = type(draft)
    for name, hint in _field_hints(kind).items():
        require(getattr(draft, name), hint, f"/{name}")


def require(value: Any, hint: Any, pointer: str) -> None:
    """Requires a value that an annotation allows.

    Args:
        value: of an argument.
        hint: its annotation, evaluated.
        pointer: of the argument.

    Raises:
        InvalidRecord: it is another one.
    """
    options = _options(hint)
    if any(_is_of(value, option) for option in options):
        for option in options:
            _require_inner(value, option, pointer)
        return
    expected = " or ".join(dict.fromkeys(_word(option) for option in options))
    raise InvalidRecord(f"expected {expected}, got {shown(value)}", pointer=pointer)


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_of(value: Any, option: Any) -> bool:
    origin = typing.get_origin(option) or option
    if origin is Any:
        return True
    if origin is Literal:
        return value in typing.get_args(option)
    if origin in (int, float):
        kinds = (int, float) if origin is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    if origin in (Iterable, Sequence):
        return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    if origin is Callable:
        return callable(value)
    return not isinstance(origin, type) or isinstance(value, origin)


def _require_inner(value: Any, option: Any, pointer: str) -> None:
    inner = typing.get_args(option)
    origin = typing.get_origin(option)
    if origin in (Iterable, Sequence) and isinstance(value, Collection):
        # Other iterables may be read once only.
        for index, each in enumerate(value):
            require(each, inner[0], f"{pointer}/{index}")
    elif origin is Mapping and isinstance(value, Mapping):
        for name, each in value.items():
            require(name, inner[0], pointer)
            require(each, inner[1], f"{pointer}/{name}")


def _word(option: Any) -> str:
    origin = typing.get_origin(option) or option
    if origin is Literal:
        return " or ".join(map(repr, typing.get_args(option)))
    if origin in (Iterable, Sequence):
        return "a list"
    if origin is Mapping:
        return "names with values"
    if origin is Callable:
        return "a function"
    return _WORDS.get(origin) or f"a {getattr(origin, '__name__', origin)}"
