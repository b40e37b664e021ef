"""Objects that the owner of flows keeps in memory."""

from __future__ import annotations

import pytest

from penstock.contracts.context import Context
from penstock.errors import InvalidExpression
from penstock.flow_owner.contents import Contents, ContentsMissing
from penstock.objects import ObjectStore


async def test_an_object_that_was_restored_is_read_again(tmp_path):
    """F3: an operator restores a lost object, and recovers the flow. The owner remembered that the
    object was lost until the process ended."""
    objects = ObjectStore(f"file://{tmp_path}/objects")
    context = await objects.check_in(Context.encode("x" * 10_000), "default")
    [file] = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    data = file.read_bytes()
    file.unlink()
    contents = Contents(objects)
    assert contents.pin(1, [context])
    await contents.fetch([context])
    with pytest.raises(InvalidExpression, match="not in the store"):
        contents.resolve(context, 1)
    # The family is advanced: its node has failed.
    contents.unpin([1])
    file.write_bytes(data)
    with pytest.raises(ContentsMissing):
        contents.resolve(context, 1)
    assert contents.pin(1, [context])
    await contents.fetch([context])
    assert contents.resolve(context, 1).decode() == "x" * 10_000


def test_an_object_is_decoded_once():
    """F2: the list of a map is read for each chunk of its items."""
    contents = Contents(ObjectStore("memory:///"))
    given = contents.refer(Context.encode(["x" * 100] * 100), "default", {})
    assert contents.resolve(given, 1).decode() is contents.resolve(given, 1).decode()
