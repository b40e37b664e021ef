"""Identity of callback targets. Pure.

A target is one URL in one namespace. Two namespaces that call the same URL have two targets:
health, rate and operators' decisions of one do not affect the other. The namespace is that of the
task type (`core.access.namespace_of`).
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.access import DEFAULT_NAMESPACE, namespace_of


class TargetId(NamedTuple):
    """Identity of a target; sorts by namespace, then URL.

    Attributes:
        namespace: of the task type that calls it.
        url: of the target.
    """

    namespace: str
    url: str

    def __str__(self) -> str:
        """For people: in the default namespace, the URL alone."""
        return self.url if self.namespace == DEFAULT_NAMESPACE else f"{self.url} ({self.namespace})"


def target_of(type_name: str, url: str) -> TargetId:
    """The target of a URL for the tasks of a type."""
    return TargetId(namespace_of(type_name), url)
