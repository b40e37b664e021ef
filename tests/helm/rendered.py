"""Helpers to examine rendered objects."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[2] / "infra" / "helm" / "penstock"
# The oldest version that Chart.yaml accepts.
KUBERNETES = ("--kube-version", "1.29.0")

Object = dict[str, Any]


@dataclass(frozen=True)
class Render:
    """The chart: its objects for a set of values, or the output of helm."""

    objects: Callable[..., list[Object]]
    run: Callable[..., subprocess.CompletedProcess[str]]
    environment: dict[str, str]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def component_of(found: Object) -> str:
    return found["metadata"]["labels"].get("app.kubernetes.io/component", "")


def pod_of(workload: Object) -> Object:
    return workload["spec"]["template"]


def workloads(objects: list[Object]) -> list[Object]:
    return of_kind(objects, "Deployment", "Job")


def workload(objects: list[Object], component: str) -> Object:
    (found,) = (each for each in workloads(objects) if component_of(each) == component)
    return found


def container_of(found: Object) -> Object:
    (container,) = pod_of(found)["spec"]["containers"]
    return container


def environment_of(found: Object) -> dict[str, Any]:
    """The value of each variable, or its source."""
    return {
        each["name"]: each["value"] if "value" in each else each["valueFrom"]
        for each in container_of(found)["env"]
    }


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector matches; an empty one matches all."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In", rule
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


@dataclass(frozen=True)
class Peer:
    """A pod of some namespace, or an address outside the cluster."""

    labels: tuple[tuple[str, str], ...] = ()
    namespace: str = "tasks"
    address: str = ""

    def matches(self, peer: Object) -> bool:
        if block := peer.get("ipBlock"):
            # Addresses of pods depend on the cluster, so a block only matches addresses outside.
            return (
                bool(self.address)
                and _within(self.address, block["cidr"])
                and not any(_within(self.address, excluded) for excluded in block.get("except", []))
            )
        if self.address:
            return False
        if "namespaceSelector" in peer:
            if not selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": self.namespace}):
                return False
        elif self.namespace != "tasks":
            return False
        return selects(peer.get("podSelector", {}), dict(self.labels))


def _within(address: str, network: str) -> bool:
    found = ipaddress.ip_address(address)
    block = ipaddress.ip_network(network)
    return found.version == block.version and found in block


def _port_matches(port: Object, number: int, protocol: str, names: dict[str, int]) -> bool:
    wanted = port.get("port")
    wanted = names.get(wanted, wanted) if isinstance(wanted, str) else wanted
    return port.get("protocol", "TCP") == protocol and wanted in (None, number)


def ports_of(found: Object) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container_of(found).get("ports", [])}


def is_allowed(
    objects: list[Object],
    component: str,
    direction: str,
    peer: Peer,
    port: int,
    protocol: str = "TCP",
    names: dict[str, int] | None = None,
) -> bool:
    """Whether NetworkPolicies allow pods of a component to send to, or receive from, a peer on a
    port.

    As in the API: pods without a policy may connect to any peer; other pods may do what any of
    their policies allows. `names` are the names of the ports at the receiving end.
    """
    labels = pod_of(workload(objects, component))["metadata"]["labels"]
    policies = [
        each["spec"]
        for each in of_kind(objects, "NetworkPolicy")
        if selects(each["spec"]["podSelector"], labels)
        and direction.capitalize() in each["spec"]["policyTypes"]
    ]
    peers_key = "to" if direction == "egress" else "from"
    rules = (rule for policy in policies for rule in policy.get(direction) or [])
    return not policies or any(
        (not rule.get(peers_key) or any(peer.matches(each) for each in rule[peers_key]))
        and (
            not rule.get("ports")
            or any(_port_matches(each, port, protocol, names or {}) for each in rule["ports"])
        )
        for rule in rules
    )


def scalars(found: Any) -> Iterator[str]:
    """All strings in an object."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield str(key)
            yield from scalars(value)
    elif isinstance(found, list):
        for value in found:
            yield from scalars(value)
    elif isinstance(found, str):
        yield found
