"""Typed contexts: a handler receives what its annotation says, or its attempt fails."""

import functools
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.errors import SettingsError
from penstock.worker import Done, Next, Task, Worker
from penstock.worker.execution import Execution


@dataclass
class Frame:
    number: int


@dataclass
class Video:
    file: Path
    frames: list[Frame] = field(default_factory=list)


class Order(TypedDict):
    item: str
    lines: list[int]


class Point(msgspec.Struct):
    x: int
    y: float = 0.5


class User(pydantic.BaseModel):
    name: str
    tags: list[int] = []


class Holder(msgspec.Struct):
    user: User


@dataclass
class Mixed:
    users: dict[str, User]


async def run(handler, value):
    """The result of an attempt with a context."""
    worker = Worker(worker_gateway="http://gateway.example")
    worker.stage("t.start")(handler)
    ready = ReadyTask(Fence(1, 0, "start", 0), "t", Context.encode(value), 60_000)
    return await Execution(worker._stages, None, 1).run(ready, pytest.fail)


def taking(annotation):
    """A handler with this annotation that returns its context."""

    async def handler(task):
        return Done(task.context)

    handler.__annotations__["task"] = annotation
    return handler


@pytest.mark.parametrize(
    ("kind", "value", "back"),
    [
        (Video, {"file": "a.mkv", "frames": [{"number": 1}], "unknown": 1}, None),
        (Order, {"item": "tea", "lines": [1]}, None),
        (Point, {"x": 1}, {"x": 1, "y": 0.5}),
        (User, {"name": "ada", "tags": ["1"]}, {"name": "ada", "tags": [1]}),
        (list[Point], [{"x": 1}], [{"x": 1, "y": 0.5}]),
        (list[User], [{"name": "ada"}], [{"name": "ada", "tags": []}]),
        (Mixed, {"users": {"a": {"name": "ada"}}}, {"users": {"a": {"name": "ada", "tags": []}}}),
        (dict[str, int], {"a": 1}, None),
        (int | str, "a", None),
        (Any, {"a": 1}, None),
    ],
)
async def test_a_context_becomes_what_the_annotation_says(kind, value, back):
    """W1: dataclasses, TypedDicts, Structs, models, and collections of them, also as results."""
    seen = []

    async def handler(task):
        seen.append(task.context)
        return Next("again", task.context)

    handler.__annotations__["task"] = Task[kind]
    result = await run(handler, value)
    assert result.outcome is Outcome.NEXT, result.error
    expected = {key: each for key, each in value.items() if key != "unknown"} if kind is Video else value
    assert result.context.decode() == (expected if back is None else back)
    if isinstance(kind, type) and kind not in (Any, Order) and not hasattr(kind, "__origin__"):
        assert isinstance(seen[0], kind)


async def test_bytes_are_a_context_too():
    """A context of bytes is no base64 text."""
    assert (await run(taking(Task[bytes]), b"\xff")).context.decode() == b"\xff"
    failed = await run(taking(Task[bytes]), "YQ==")
    assert failed.error.message == "the context does not fit bytes: Expected `bytes`, got `str`"


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (
            Video,
            {"file": "a", "frames": [{"number": "1"}]},
            "fit Video: Expected `int`, got `str` - at `$.frames[0].number`",
        ),
        (Video, {}, "fit Video: Object missing required field `file`"),
        (Video, {"file": 7}, "fit Video: Cannot make `Path` of `int` - at `$.file`"),
        (Order, {"item": "tea", "lines": [None]}, "fit Order: Expected `int`, got `null` - at `$.lines[0]`"),
        (Point, [1], "fit Point: Expected `object`, got `array`"),
        (
            User,
            {"name": "ada", "tags": ["x"]},
            "fit User: Input should be a valid integer, unable to parse string as an integer - at `$.tags[0]`",
        ),
        (User, {"tags": ["x"]}, "fit User: Field required - at `$.name`, and 1 more"),
        (
            Holder,
            {"user": {}},
            "fit Holder: the context does not fit User: Field required - at `$.name` - at `$.user`",
        ),
        (Mixed, {"users": {"a": {}}}, "fit Mixed: Field required - at `$.users.a.name`"),
    ],
)
async def test_a_context_that_does_not_fit_fails_the_attempt_for_good(kind, value, message):
    """W1: the failure names the path, the handler does not run, and no further attempt follows."""
    result = await run(taking(Task[kind]), value)
    assert (result.outcome, result.permanent) == (Outcome.FAIL, True)
    assert result.error.kind == "InvalidContext"
    assert message in result.error.message
    assert result.error.traceback is None


async def test_annotations_as_text_and_local_types_are_resolved():
    """A module with `from __future__ import annotations`, and types in a function."""

    @dataclass
    class Local:
        n: int

    worker = Worker(worker_gateway="http://gateway.example")

    @worker.stage("t.start")
    async def start(task: "Task[Local]") -> Done:
        return Done(task.context.n + 1)

    ready = ReadyTask(Fence(1, 0, "start", 0), "t", Context.encode({"n": 1}), 60_000)
    result = await Execution(worker._stages, None, 1).run(ready, pytest.fail)
    assert result.context.decode() == 2


async def test_methods_partials_and_synchronous_handlers_have_typed_contexts():
    """Any callable may be a handler."""

    class Handlers:
        async def method(self, task: Task[Point]):
            return Done(task.context.x)

    def synchronous(extra, task: Task[Point]):
        return Done(task.context.x + extra)

    assert (await run(Handlers().method, {"x": 3})).context.decode() == 3
    assert (await run(functools.partial(synchronous, 1), {"x": 3})).context.decode() == 4


class Plain:
    """No type of JSON."""


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Task[Plain], "no context can be Plain: it is neither a dataclass"),
        (
            "Task[Missing]",
            r"'Task\[Missing\]' cannot be resolved: name 'Missing' is not defined; import its names",
        ),
    ],
)
def test_an_impossible_annotation_is_refused_at_registration(annotation, words):
    """O8: the worker does not start with a handler that every context would fail."""
    worker = Worker(worker_gateway="http://gateway.example")
    with pytest.raises(SettingsError, match=words):
        worker.stage("t.start")(taking(annotation))


@pytest.mark.parametrize("annotation", [Task, "Task", "Anything", "dict[str, Missing]", int])
async def test_other_annotations_leave_the_context_as_it_is(annotation):
    """Handlers without a typed context are as before."""
    assert (await run(taking(annotation), {"a": [1]})).context.decode() == {"a": [1]}


def test_a_worker_without_typed_contexts_imports_neither_library():
    """pydantic is used only where it is installed and named, and nothing is slower to start."""
    program = "import sys, penstock.worker; print({'msgspec', 'pydantic'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
