"""Bindings of a prefix to a database (`deployment.schema.json`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from penstock.errors import InvalidRecord


@dataclass(frozen=True, slots=True)
class Binding:
    """A database that a prefix is to belong to.

    Attributes:
        database: the database's id.
        replaces: also when the prefix belongs to another one: an operator has asked for it.
    """

    database: str
    replaces: bool = False

    def encode(self) -> bytes:
        """The record's value."""
        return orjson.dumps({"database": self.database, "replaces": self.replaces})

    @classmethod
    def decode(cls, data: bytes) -> Binding:
        """Reads a record's value.

        Raises:
            InvalidRecord: it is no binding.
        """
        try:
            raw = orjson.loads(data)
            return cls(str(raw["database"]), replaces=bool(raw["replaces"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRecord(f"not a binding: {error!r}") from error


def bound_to(bindings: Iterable[Binding]) -> str | None:
    """The database of a prefix: that of the first binding, or of the last that replaces.

    All readers agree, also when two deployments write at the same time.
    """
    found: str | None = None
    for binding in bindings:
        if found is None or binding.replaces:
            found = binding.database
    return found
