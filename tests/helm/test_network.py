"""NetworkPolicies let each service reach what it needs, and nothing else."""

from __future__ import annotations

import pytest

from tests.helm.rendered import (
    SERVICES,
    Object,
    Peer,
    Render,
    allowed,
    component_of,
    of_kind,
    pod_of,
    ports_of,
)
from tests.helm.rendered import workload as found_workload

OUTSIDE = Peer(address="93.184.216.34")
PRIVATE = Peer(address="10.1.2.3")
METADATA = Peer(address="169.254.169.254")
STRANGER = Peer(labels=(("app", "other"),), namespace="elsewhere")
DNS = Peer(labels=(("k8s-app", "kube-dns"),), namespace="kube-system")
BROKER = Peer(labels=(("strimzi.io/cluster", "events"),), namespace="kafka")
DATABASE = Peer(labels=(("cnpg.io/cluster", "tasks"),))
STORE = Peer(labels=(("app", "minio"),), namespace="storage")
COLLECTOR = Peer(labels=(("app", "collector"),), namespace="observability")
HOOKS = ("migrate", "topics")


def pod(objects: list[Object], component: str) -> Peer:
    return Peer(labels=tuple(pod_of(found_workload(objects, component))["metadata"]["labels"].items()))


def reaches(objects: list[Object], component: str, peer: Peer, port: int, protocol: str = "TCP") -> bool:
    return allowed(objects, component, "egress", peer, port, protocol)


@pytest.mark.parametrize("component", [*SERVICES, *HOOKS])
def test_what_each_service_needs(render: Render, component: str) -> None:
    """Issue 7: with brokers, database and store named, each service reaches those it uses, and names; no more."""
    objects = render.objects("strimzi-cnpg")
    uses_kafka = component != "migrate"
    uses_postgres = component != "topics"
    uses_objects = component in ("gateway", "task-sync")
    assert reaches(objects, component, DNS, 53, "UDP")
    assert reaches(objects, component, DNS, 53)
    assert reaches(objects, component, BROKER, 9093) == uses_kafka
    assert reaches(objects, component, DATABASE, 5432) == uses_postgres
    assert reaches(objects, component, STORE, 9000) == uses_objects
    # Not by another port, not another pod, not the world.
    assert not reaches(objects, component, BROKER, 9092)
    assert not reaches(objects, component, DATABASE, 22)
    for port in (53, 443, 5432, 9000, 9093):
        assert not reaches(objects, component, STRANGER, port)
        assert not reaches(objects, component, METADATA, port)
        assert reaches(objects, component, OUTSIDE, port) == (component == "callbacks")


def test_callbacks_go_outside_and_not_inside(render: Render) -> None:
    """Issue 7: callbacks reach public addresses on every port; private ones only where `callbacks.allow` names them."""
    plain, allowing = render.objects("minimal"), render.objects("everything")
    for port in (80, 443, 8443):
        for objects in (plain, allowing):
            assert reaches(objects, "callbacks", OUTSIDE, port)
            assert reaches(objects, "callbacks", Peer(address="2606:2800:220:1::1"), port)
            assert not reaches(objects, "callbacks", METADATA, port)
            assert not reaches(objects, "callbacks", Peer(address="192.168.1.1"), port)
            assert not reaches(objects, "callbacks", Peer(address="fd00::1"), port)
        assert not reaches(plain, "callbacks", PRIVATE, port)
        assert reaches(allowing, "callbacks", PRIVATE, port)
        assert reaches(allowing, "callbacks", Peer(address="fd12::1"), port)


def test_servers_that_are_not_named_are_anywhere(render: Render) -> None:
    """Issue 7: without peers Kafka, PostgreSQL and the store are reached wherever they are, on their ports alone."""
    objects = render.objects("everything")
    for component in SERVICES:
        for port in (9092, 9093, 9094, 5432):
            assert reaches(objects, component, PRIVATE, port)
            assert reaches(objects, component, STRANGER, port)
        assert not reaches(objects, component, STRANGER, 9095)
        assert reaches(objects, component, COLLECTOR, 4318)
    managed = render.objects("managed")
    for component in SERVICES:
        assert reaches(managed, component, Peer(address="10.20.1.1"), 9098)
        assert reaches(managed, component, Peer(address="10.21.0.9"), 6432)
        assert not reaches(managed, component, Peer(address="10.21.1.9"), 6432)
        # Tokens for Kafka; the store and OIDC are on the same port.
        assert reaches(managed, component, OUTSIDE, 443)
    assert not reaches(managed, "migrate", OUTSIDE, 443)


def test_oidc_is_asked_by_the_gateway_alone(render: Render) -> None:
    """Issue 7: with OIDC the gateway reaches its issuer, and nobody else does for it."""
    objects = render.objects("everything")
    assert reaches(objects, "gateway", OUTSIDE, 443)
    for component in ("task-sync", "heartbeats", "stages", "worker-all"):
        assert not reaches(objects, component, OUTSIDE, 443)


def test_who_reaches_the_gateway(render: Render) -> None:
    """Issue 7: those who are named reach the gateway on its port, workers by the gateway always, metrics apart."""
    objects = render.objects("keda")
    names = ports_of(found_workload(objects, "gateway"))
    ingress = Peer(labels=(("app", "nginx"),), namespace="ingress")

    def lets_in(component: str, peer: Peer, port: int) -> bool:
        return allowed(objects, component, "ingress", peer, port, names=names)

    assert lets_in("gateway", ingress, 8420)
    assert lets_in("gateway", pod(objects, "worker-thumbs"), 8420)
    assert not lets_in("gateway", pod(objects, "worker-mail"), 8420)
    assert not lets_in("gateway", ingress, 22)
    assert not lets_in("gateway", pod(objects, "worker-thumbs"), 22)
    assert not lets_in("gateway", STRANGER, 8420)
    assert not lets_in("gateway", OUTSIDE, 8420)
    for component in SERVICES:
        assert lets_in(component, STRANGER, 9100)
        assert not lets_in(component, OUTSIDE, 9100)
        assert not lets_in(component, STRANGER, 22)
    for component in ("worker-mail", "worker-thumbs", *HOOKS):
        assert not lets_in(component, STRANGER, 9100)


def test_what_workers_reach(render: Render) -> None:
    """Issue 7: a worker reaches Kafka and the store, or the gateway alone, and what its own rules add."""
    objects = render.objects("keda")
    names = ports_of(found_workload(objects, "gateway"))
    gateway = pod(objects, "gateway")
    assert allowed(objects, "worker-thumbs", "egress", gateway, 8420, names=names)
    assert not allowed(objects, "worker-mail", "egress", gateway, 8420, names=names)
    for component, by_kafka in (("worker-mail", True), ("worker-thumbs", False)):
        assert reaches(objects, component, DNS, 53, "UDP")
        assert reaches(objects, component, BROKER, 9093) == by_kafka
        assert reaches(objects, component, OUTSIDE, 443) == by_kafka
        assert not reaches(objects, component, DATABASE, 5432)
    everything = render.objects("everything")
    assert reaches(everything, "worker-all", Peer(address="10.9.1.1"), 443)
    assert allowed(everything, "worker-all", "ingress", DATABASE, 9000)


def test_without_policies(render: Render) -> None:
    """Issue 7: policies can be left to the cluster; with them, every pod is under one that refuses."""
    assert not of_kind(render.objects("minimal", "--set", "networkPolicy.enabled=false"), "NetworkPolicy")
    policies = of_kind(render.objects("minimal"), "NetworkPolicy")
    (deny,) = (each for each in policies if not component_of(each))
    assert deny["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(deny["spec"])
