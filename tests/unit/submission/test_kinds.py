"""The kinds of submissions: what they make of an entry, and what they look up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from penstock.contracts.context_digest import digest_of
from penstock.core.flow.outline import Outline
from penstock.errors import Faults, Invalid, InvalidRecord, UnknownFlow, UnknownType
from penstock.postgres.flow_definitions import Reached
from penstock.submission import EventKind, FlowKind, SubmissionKind, TaskKind

OBJECTS: Any = None


class Types:
    """Types that are registered, and the names that were looked up."""

    def __init__(self, **types: Any) -> None:
        self.types = types
        self.required: list[set[str]] = []

    async def require(self, names):
        self.required.append(set(names))

    def get(self, name, /):
        return self.types.get(name)


class Definitions:
    """One definition, and the references that were looked up."""

    def __init__(self) -> None:
        self.reached: list[set[Any]] = []

    async def reach(self, references):
        self.reached.append(set(references))
        return Reached({"f": 1}, {("f", 1): Outline("f", 1, {"size": {"default": 5}}, 1, [])})


def kinds() -> list[SubmissionKind[Any, Any, Any]]:
    definitions: Any = Definitions()
    return [TaskKind(Types(), OBJECTS), FlowKind(definitions, OBJECTS), EventKind(OBJECTS)]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.schema)
def test_an_entry_is_read_with_all_its_faults(kind):
    """T5: a value and its text have the same faults, one for each wrong field."""
    raw = {"key": 1, "labels": 1, "priority": 1, "version": 0, "colour": 1}
    by_value, by_text = kind.decode(raw), kind.decode(orjson.dumps(raw))
    assert isinstance(by_value, Faults)
    assert isinstance(by_text, Faults)
    assert [str(fault) for fault in by_text.faults] == [str(fault) for fault in by_value.faults]
    # The missing fields, the unknown ones, and a wrong one.
    assert len(by_value.faults) >= 3


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.schema)
def test_unforeseen_content_is_a_fault(kind, monkeypatch):
    """T5: an error that validation did not foresee stops no partition and fails no request."""
    for error in (
        OverflowError("large"),
        KeyError("name"),
        RecursionError(),
        TypeError("a"),
        ValueError("b"),
    ):

        def fail(_raw, error=error):
            raise error

        monkeypatch.setattr(kind, "from_wire", fail)
        fault = kind.decode({})
        assert isinstance(fault, InvalidRecord)
        assert fault.reason == f"cannot be read: {error!r}"


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.schema)
async def test_a_fault_of_the_caller_stays(kind):
    """T5: an entry that cannot be parsed is refused for that, and harms none beside it."""
    fault = InvalidRecord("not JSON")
    assert kind.decode(fault) is fault
    assert await kind.admit([fault]) == [fault]
    with pytest.raises(InvalidRecord, match="not JSON"):
        await kind.read(b"{")


async def test_a_type_that_is_unknown_or_invisible_is_refused():
    """T5, O5: both in the same words; the others are admitted, after one look-up of all names."""
    types = Types(mine=SimpleNamespace(is_strict=False), theirs=SimpleNamespace(is_strict=False))
    kind = TaskKind(types, OBJECTS)
    decoded = [kind.decode({"type": name}) for name in ("mine", "theirs", "none", "mine")]
    mine, theirs, none, again = await kind.admit(decoded, lambda name: name != "theirs")
    assert (mine, again) == (decoded[0], decoded[3])
    assert types.required == [{"mine", "theirs", "none"}]
    for name, refused in (("theirs", theirs), ("none", none)):
        assert isinstance(refused, UnknownType)
        assert str(refused) == f"/type: no task type '{name}' is registered: register it with POST /types"
    # A request without a readable entry needs no database.
    assert isinstance((await kind.admit([kind.decode(7)]))[0], Invalid)
    assert len(types.required) == 1


async def test_only_strict_types_get_digests():
    """T5: a digest costs time, and only a strict type compares it."""
    kind = TaskKind(
        Types(strict=SimpleNamespace(is_strict=True), lenient=SimpleNamespace(is_strict=False)), OBJECTS
    )
    strict = await kind.read({"type": "strict", "idempotency_key": "k", "context": 1})
    assert strict.context_digest == digest_of(strict.context)
    assert (await kind.read({"type": "strict", "context": 1})).context_digest is None
    assert (await kind.read({"type": "lenient", "idempotency_key": "k"})).context_digest is None


async def test_the_newest_version_is_looked_up_once_a_batch():
    """F4: the entries of a batch have one version; the next batch finds a version that is newer."""
    definitions: Any = Definitions()
    kind = FlowKind(definitions, OBJECTS)
    for _ in range(2):
        batch = kind.open_batch()
        for _ in range(3):
            assert (await batch.read({"flow": "f"})).inputs.decode() == {"size": 5}
    assert definitions.reached == [{("f", None)}] * 2


async def test_an_invisible_definition_is_not_looked_up():
    """F4, O5: it is refused like one that does not exist."""
    definitions: Any = Definitions()
    kind = FlowKind(definitions, OBJECTS)
    decoded = [kind.decode({"flow": "f"}), kind.decode({"flow": "f", "version": 1})]
    refused = await kind.admit(decoded, lambda _name: False)
    assert [(type(each), each.pointer) for each in refused] == [
        (UnknownFlow, "/flow"),
        (UnknownFlow, "/version"),
    ]
    assert definitions.reached == []
