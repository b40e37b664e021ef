"""NetworkPolicies allow only the connections that each service needs."""

from __future__ import annotations

import pytest

from penstock.kafka.topology.services import SERVICES
from tests.helm.rendered import (
    Object,
    Peer,
    Render,
    component_of,
    is_allowed,
    of_kind,
    pod_of,
    ports_of,
)
from tests.helm.rendered import workload as find_workload

OUTSIDE = Peer(address="93.184.216.34")
PRIVATE = Peer(address="10.1.2.3")
METADATA = Peer(address="169.254.169.254")
OTHER_POD = Peer(labels=(("app", "other"),), namespace="elsewhere")
DNS = Peer(labels=(("k8s-app", "kube-dns"),), namespace="kube-system")
BROKER = Peer(labels=(("strimzi.io/cluster", "events"),), namespace="kafka")
DATABASE = Peer(labels=(("cnpg.io/cluster", "tasks"),))
STORE = Peer(labels=(("app", "minio"),), namespace="storage")
PROMETHEUS = Peer(labels=(("app.kubernetes.io/name", "prometheus"),), namespace="monitoring")
COLLECTOR = Peer(labels=(("app", "collector"),), namespace="observability")
HOOKS = ("migrate", "topics")


def pod(objects: list[Object], component: str) -> Peer:
    return Peer(labels=tuple(pod_of(find_workload(objects, component))["metadata"]["labels"].items()))


def reaches(objects: list[Object], component: str, peer: Peer, port: int, protocol: str = "TCP") -> bool:
    return is_allowed(objects, component, "egress", peer, port, protocol)


@pytest.mark.parametrize("component", [*SERVICES, *HOOKS])
def test_each_service_reaches_only_the_servers_it_uses(render: Render, component: str) -> None:
    """O13: with peers for brokers, database and store, each service reaches only the ones it
    uses, and DNS."""
    objects = render.objects("strimzi-cnpg")
    uses_kafka = component != "migrate"
    uses_postgres = component != "topics"
    uses_objects = component in SERVICES and SERVICES[component].objects
    assert reaches(objects, component, DNS, 53, "UDP")
    assert reaches(objects, component, DNS, 53)
    assert reaches(objects, component, BROKER, 9093) == uses_kafka
    assert reaches(objects, component, DATABASE, 5432) == uses_postgres
    assert reaches(objects, component, STORE, 9000) == uses_objects
    # No other ports, pods or addresses.
    assert not reaches(objects, component, BROKER, 9092)
    assert not reaches(objects, component, DATABASE, 22)
    for port in (53, 443, 5432, 9000, 9093):
        assert not reaches(objects, component, OTHER_POD, port)
        assert not reaches(objects, component, METADATA, port)
        assert reaches(objects, component, OUTSIDE, port) == (component == "callbacks")


def test_callbacks_reach_public_addresses_only(render: Render) -> None:
    """O13: callbacks reach public addresses on every port, and private ones only with
    `callbacks.allow`."""
    default_objects, extended_objects = render.objects("minimal"), render.objects("everything")
    for port in (80, 443, 8443):
        for objects in (default_objects, extended_objects):
            assert reaches(objects, "callbacks", OUTSIDE, port)
            assert reaches(objects, "callbacks", Peer(address="2606:2800:220:1::1"), port)
            assert not reaches(objects, "callbacks", METADATA, port)
            assert not reaches(objects, "callbacks", Peer(address="192.168.1.1"), port)
            assert not reaches(objects, "callbacks", Peer(address="fd00::1"), port)
        assert not reaches(default_objects, "callbacks", PRIVATE, port)
        assert reaches(extended_objects, "callbacks", PRIVATE, port)
        assert reaches(extended_objects, "callbacks", Peer(address="fd12::1"), port)


def test_servers_without_peers_may_be_anywhere(render: Render) -> None:
    """O13: without peers, Kafka, PostgreSQL and the store are reachable anywhere, but only
    on their ports."""
    objects = render.objects("everything")
    for component in SERVICES:
        for port in (9092, 9093, 9094, 5432):
            assert reaches(objects, component, PRIVATE, port)
            assert reaches(objects, component, OTHER_POD, port)
        assert not reaches(objects, component, OTHER_POD, 9095)
        assert reaches(objects, component, COLLECTOR, 4318)
    managed = render.objects("managed")
    for component in SERVICES:
        assert reaches(managed, component, Peer(address="10.20.1.1"), 9098)
        assert reaches(managed, component, Peer(address="10.21.0.9"), 6432)
        assert not reaches(managed, component, Peer(address="10.21.1.9"), 6432)
        # Tokens for Kafka; the store and OIDC use the same port.
        assert reaches(managed, component, OUTSIDE, 443)
    assert not reaches(managed, "migrate", OUTSIDE, 443)


def test_only_the_gateway_reaches_the_oidc_issuer(render: Render) -> None:
    """O13: with OIDC, only the gateway reaches the issuer."""
    objects = render.objects("everything")
    assert reaches(objects, "gateway", OUTSIDE, 443)
    for component in ("task-sync", "heartbeats", "stages", "worker-all"):
        assert not reaches(objects, component, OUTSIDE, 443)


def test_only_named_peers_reach_the_gateway(render: Render) -> None:
    """O13: named peers reach the gateway on its port, and so do workers via the gateway.
    Metrics have separate peers."""
    objects = render.objects("keda")
    names = ports_of(find_workload(objects, "gateway"))
    ingress = Peer(labels=(("app", "nginx"),), namespace="ingress")

    def accepts(component: str, peer: Peer, port: int) -> bool:
        return is_allowed(objects, component, "ingress", peer, port, names=names)

    assert accepts("gateway", ingress, 8420)
    assert accepts("gateway", pod(objects, "worker-thumbs"), 8420)
    assert not accepts("gateway", pod(objects, "worker-mail"), 8420)
    assert not accepts("gateway", ingress, 22)
    assert not accepts("gateway", pod(objects, "worker-thumbs"), 22)
    assert not accepts("gateway", OTHER_POD, 8420)
    assert not accepts("gateway", OUTSIDE, 8420)
    for component in SERVICES:
        assert accepts(component, PROMETHEUS, 9100)
        assert not accepts(component, OTHER_POD, 9100)
        assert not accepts(component, OUTSIDE, 9100)
        assert not accepts(component, OTHER_POD, 22)
    for component in ("worker-mail", "worker-thumbs", *HOOKS):
        assert not accepts(component, OTHER_POD, 9100)


def test_workers_reach_kafka_or_the_gateway(render: Render) -> None:
    """O13: a worker reaches either Kafka and the store or the gateway, plus the peers of its
    own rules."""
    objects = render.objects("keda")
    names = ports_of(find_workload(objects, "gateway"))
    gateway = pod(objects, "gateway")
    assert is_allowed(objects, "worker-thumbs", "egress", gateway, 8420, names=names)
    assert not is_allowed(objects, "worker-mail", "egress", gateway, 8420, names=names)
    for component, by_kafka in (("worker-mail", True), ("worker-thumbs", False)):
        assert reaches(objects, component, DNS, 53, "UDP")
        assert reaches(objects, component, BROKER, 9093) == by_kafka
        assert reaches(objects, component, OUTSIDE, 443) == by_kafka
        assert not reaches(objects, component, DATABASE, 5432)
    everything = render.objects("everything")
    assert reaches(everything, "worker-all", Peer(address="10.9.1.1"), 443)
    assert is_allowed(everything, "worker-all", "ingress", DATABASE, 9000)


def test_policies_can_be_disabled(render: Render) -> None:
    """O13: policies can be disabled; with policies, one denies all other connections of
    every pod."""
    assert not of_kind(render.objects("minimal", "--set", "networkPolicy.enabled=false"), "NetworkPolicy")
    policies = of_kind(render.objects("minimal"), "NetworkPolicy")
    (deny,) = (each for each in policies if not component_of(each))
    assert deny["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(deny["spec"])


def test_only_prometheus_reaches_the_metrics(render: Render) -> None:
    """O4, O5: by default a pod with the label of Prometheus reads metrics, in any namespace. No
    other pod does: neither a worker of the release nor one elsewhere."""
    objects = render.objects("minimal")
    for component in SERVICES:
        names = ports_of(find_workload(objects, component))
        accepted = [
            peer
            for peer in (PROMETHEUS, OTHER_POD, pod(objects, component), PRIVATE, OUTSIDE)
            if is_allowed(objects, component, "ingress", peer, names["metrics"], names=names)
        ]
        assert accepted == [PROMETHEUS]
