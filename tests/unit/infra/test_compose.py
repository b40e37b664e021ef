"""docker-compose.yml: who has which credentials, and what is reachable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.service_apps import settings_of

from penstock.cli.passwords import variable_of
from penstock.kafka.topology import acls
from penstock.kafka.topology.services import SERVICES
from penstock.settings import Reporting

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(TEXT)["services"]
EXAMPLE = (ROOT / ".env.example").read_text()
# Variables without which nothing starts.
REQUIRED = set(re.findall(r"\$\{(\w+):\?", TEXT))

SUPERUSER = "POSTGRES_PASSWORD"
# The services that make or check the tokens of reports: those with the setting.
CHECKS_REPORTS = {name for name in SERVICES if issubclass(settings_of(name), Reporting)}


def secrets_of(service: str) -> set[str]:
    """The required variables that a container's description names."""
    return set(re.findall(r"\$\{(\w+)", str(COMPOSE[service]))) & REQUIRED


def environment(service: str) -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE[service]["environment"]
    return found


def environment_or_none(service: str) -> dict[str, Any]:
    return COMPOSE[service].get("environment") or {}


def test_every_secret_is_in_the_example() -> None:
    """O5: `make .env` draws every secret that the file needs, and no other."""
    assert set(re.findall(r"^(\w+)=$", EXAMPLE, re.MULTILINE)) == REQUIRED


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_the_password_of_its_own_users(service: str) -> None:
    """O5: a service logs in to PostgreSQL and Kafka as itself, and has no other service's
    password."""
    own = variable_of(service)
    others = {"PENSTOCK_METRICS_TOKEN"} | {
        "callbacks": {"PENSTOCK_CALLBACK_SECRETS", "PENSTOCK_ENCRYPTION_KEYS"},
        "gateway": {"PENSTOCK_ENCRYPTION_KEYS"},
    }.get(service, set())
    if service in CHECKS_REPORTS:
        others |= {"PENSTOCK_REPORT_KEYS"}
    assert secrets_of(service) == {own} | others
    found = environment(service)
    role = f"penstock_{service.replace('-', '_')}"
    assert found["PENSTOCK_POSTGRES"] == f"postgresql://{role}:${{{own}}}@postgres:5432/penstock"
    assert (found["PENSTOCK_KAFKA_USER"], found["PENSTOCK_KAFKA_PASSWORD"]) == (
        f"penstock-{service}",
        f"${{{own}}}",
    )
    assert found["PENSTOCK_KAFKA_PROTOCOL"] == "SASL_PLAINTEXT"


def test_a_worker_has_only_the_password_of_workers() -> None:
    """O5: a worker has Kafka's user `penstock-worker`, and no access to PostgreSQL. It asks for the
    token of metrics as each service does."""
    assert secrets_of("worker") - {"PENSTOCK_METRICS_TOKEN"} <= {variable_of("worker")}
    assert environment("worker")["PENSTOCK_KAFKA_USER"] == "penstock-worker"
    assert "PENSTOCK_POSTGRES" not in environment("worker")


def test_reports_of_workers_need_tokens() -> None:
    """O5: the services that write ready records, and those that read reports, have the keys of
    tokens. Workers have none, so a worker cannot make the token of a foreign attempt."""
    assert {name for name in COMPOSE if "PENSTOCK_REPORT_KEYS" in environment_or_none(name)} == CHECKS_REPORTS
    assert {"gateway", "task-sync", "heartbeats", "stages", "tasklogs"} == CHECKS_REPORTS


def test_only_the_servers_own_containers_know_the_superusers() -> None:
    """O5: PostgreSQL and `migrate` know the superuser's password. Only `migrate` shares Kafka's
    network, in which the superuser's listener is, and it ends before the services start."""
    assert {name for name in COMPOSE if SUPERUSER in secrets_of(name)} == {"postgres", "migrate"}
    assert [name for name in COMPOSE if "network_mode" in COMPOSE[name]] == ["migrate"]
    assert COMPOSE["migrate"]["network_mode"] == "service:kafka"
    for service in SERVICES:
        assert COMPOSE[service]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"


def test_migrate_gives_every_user_its_password() -> None:
    """O5: each user of the access lists that compose knows gets its password at each `up`."""
    names = {variable_of(name) for name in (*acls.SERVICES, "owner")}
    assert names <= secrets_of("migrate")


def test_kafka_listens_without_credentials_on_loopback_only() -> None:
    """O5: the listener that other containers reach asks for SASL. Those without are on the broker's
    loopback, and nothing is allowed that no list has."""
    found = environment("kafka")
    protocols = dict(one.split(":") for one in found["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    open_beyond = {
        listener
        for listener, host in re.findall(r"(\w+)://([^:,]*):\d+", found["KAFKA_LISTENERS"])
        if host != "localhost" and not protocols[listener].startswith("SASL_")
    }
    assert not open_beyond
    assert found["KAFKA_AUTHORIZER_CLASS_NAME"].endswith("StandardAuthorizer")
    assert "KAFKA_ALLOW_EVERYONE_IF_NO_ACL_FOUND" not in found


def test_prometheus_has_the_token_that_the_metrics_need() -> None:
    """O4, O5: every service asks for the token, and Prometheus sends it to each."""
    for service in (*SERVICES, "worker"):
        assert environment(service)["PENSTOCK_METRICS_TOKEN"].startswith("${PENSTOCK_METRICS_TOKEN")
    assert COMPOSE["prometheus"]["secrets"] == ["metrics-token"]
    jobs = yaml.safe_load((ROOT / "infra/observability/prometheus.yml").read_text())["scrape_configs"]
    for job in jobs:
        assert job["authorization"] == {"credentials_file": "/run/secrets/metrics-token"}
