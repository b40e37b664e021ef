"""Whom a callback is owed to. Pure.

A target is an address as one namespace calls it: two namespaces that call the same URL have two targets, and what one of them meets
there, or says of it, is nothing to the other. The namespace is that of the callback's type (`core.access.namespace_of`).
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.access import DEFAULT_NAMESPACE, namespace_of


class TargetId(NamedTuple):
    """Which target. In the order of their namespaces, where they are sorted.

    Attributes:
        namespace: in which it is called.
        url: the address.
    """

    namespace: str
    url: str

    def __str__(self) -> str:
        """For people: where there are no namespaces, the URL alone."""
        return self.url if self.namespace == DEFAULT_NAMESPACE else f"{self.url} ({self.namespace})"


def target_of(type_name: str, url: str) -> TargetId:
    """An address as the tasks of a type call it."""
    return TargetId(namespace_of(type_name), url)
