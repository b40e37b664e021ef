"""What a request changed, as the audit keeps it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Stands for a value that the document before a change did not have.
_MISSING = object()


def difference(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a document that differ, with their values before and after a change.

    Args:
        before: the document; None if there was none.
        after: the document; None if it was removed.
    """
    if before is None or after is None:
        return {"before": _copy(before), "after": _copy(after)}
    names = [
        name
        for name in dict.fromkeys([*before, *after])
        if before.get(name, _MISSING) != after.get(name, _MISSING)
    ]
    return {
        "before": {name: before[name] for name in names if name in before},
        "after": {name: after[name] for name in names if name in after},
    }


def _copy(document: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if document is None else dict(document)
