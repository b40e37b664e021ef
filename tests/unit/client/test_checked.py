"""Each argument of each method of the client is checked by its annotation."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import Client, FlowFilter, SyncClient, TaskFilter
from penstock.client.checked import require
from penstock.core.task import Priority
from penstock.errors import InvalidRecord

METHODS = [
    name for name, _method in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")
]
# A value of each kind; a text is none of the others.
VALUES: dict[str, Any] = {
    "text": "high",
    "integer": 7,
    "number": 0.5,
    "flag": True,
    "moment": datetime(2026, 11, 24, tzinfo=UTC),
    "list": [{}],
    "mapping": {"a": {}},
    "bytes": b"x",
    "object": object(),
}


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value, decided apart from the code under test."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (Union, type(int | None)):
        return any(fits(value, each) for each in inner)
    if origin is Any:
        return True
    if origin is Literal:
        return value in inner
    if origin in (Iterable, Sequence):
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values())
    if origin is Callable:
        return callable(value)
    if origin is float:
        return type(value) in (int, float)
    return type(value) is origin if origin in (int, bool) else isinstance(value, origin)


def right(hint: Any) -> Any:
    """A value that an annotation allows."""
    found = [
        each
        for each in (*VALUES.values(), None, [], {}, TaskFilter(ids=[1]), FlowFilter(ids=[1]))
        if fits(each, hint)
    ]
    return found[0] if found else next(iter(typing.get_args(hint)))


async def call(method: Any, **arguments: Any) -> None:
    async with Client("http://127.0.0.1:1", patience_s=0) as client:
        made = getattr(client, method)(**arguments)
        if inspect.isasyncgen(made):
            async for _ in made:
                pass
        else:
            await made


@pytest.mark.parametrize("method", METHODS)
async def test_each_wrong_argument_is_named(method: str) -> None:
    """O8: the error names the argument, and no request is sent, for values of all kinds."""
    function = getattr(Client, method)
    hints = typing.get_type_hints(function)
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    needed = {
        name: right(hints[name])
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    for name in parameters:
        for value in VALUES.values():
            if fits(value, hints[name]):
                continue
            with pytest.raises(InvalidRecord) as caught:
                await call(method, **{**needed, name: value})
            assert (caught.value.pointer or "").split("/")[1] == name
            assert "expected" in str(caught.value)


@pytest.mark.parametrize("method", ["submit", "submit_flow", "submit_and_wait", "operate"])
async def test_an_error_names_a_priority_in_lower_case(method: str) -> None:
    """O8: a text that is no priority has the right type, so it is checked apart."""
    needed: dict[str, Any] = {
        "submit_flow": {"flow": "f"},
        "operate": {"verb": "reprioritise", "which": TaskFilter(ids=[1])},
    }.get(method, {"type": "t"})
    with pytest.raises(InvalidRecord) as caught:
        await call(method, **needed, priority="high")
    assert caught.value.pointer == "/priority"


@given(
    st.lists(st.integers()), st.lists(st.one_of(st.text(), st.floats(), st.booleans(), st.none()), min_size=1)
)
def test_the_first_wrong_element_is_named(good: list[int], bad: list[Any]) -> None:
    """O8: its place is in the pointer."""
    with pytest.raises(InvalidRecord) as caught:
        require([*good, *bad], Iterable[int], "/ids")
    assert caught.value.pointer == f"/ids/{len(good)}"
    require(good, Iterable[int], "/ids")


def test_what_the_annotation_allows_is_accepted() -> None:
    """A check that is too strict would refuse working programs."""
    for value in ([1], (1,), {1}, range(3), iter([1])):
        require(value, Iterable[int], "/ids")
    for value in (1, 1.5, None):
        require(value, float | None, "/timeout_s")
    for value in ("HIGH", Priority.HIGH):
        require(value, Priority | str, "/priority")
    require({"a": "b"}, Mapping[str, str] | None, "/labels")


def test_both_clients_have_the_signatures_of_their_methods() -> None:
    """The checks leave names, parameters and docstrings to `help` and to editors."""
    for name in METHODS:
        checked, blocking = getattr(Client, name), getattr(SyncClient, name)
        assert checked.__doc__
        assert list(inspect.signature(checked).parameters) == list(inspect.signature(blocking).parameters)
