"""The files of a deployment and its pages have every service of
`penstock.kafka.topology.services`, and no other.

PENSTOCK_WRITE_DOCS=1 pytest tests/contract/test_services.py    renews the lists.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.service_apps import settings_of

from penstock.cli.passwords import variable_of
from penstock.kafka.topology.rights import GROUP, PREFIXED, READ, WRITE, Right
from penstock.kafka.topology.services import SERVICES
from penstock.kafka.topology.topics import DEPLOYMENT
from penstock.postgres import roles
from penstock.settings import Platform

ROOT = Path(__file__).parents[2]
CHART = ROOT / "infra" / "helm" / "penstock"
# Callbacks have a row of their own, because their targets are outside.
INSIDE = {name: service for name, service in SERVICES.items() if name not in {"gateway", "callbacks"}}


def section_of(name: str) -> str:
    """The key of a service in the values of the chart."""
    first, *others = name.split("-")
    return first + "".join(part.capitalize() for part in others)


def chart_list() -> str:
    rows = [
        json.dumps({"component": name, "values": section_of(name), "objects": service.objects})
        for name, service in SERVICES.items()
    ]
    return "[\n  " + ",\n  ".join(rows) + "\n]\n"


def inside(*, objects: bool, form: str = "{}") -> str:
    return ", ".join(form.format(name) for name, each in INSIDE.items() if each.objects is objects)


def named(right: Right) -> str:
    return f"`{right.name}*`" if right.pattern == PREFIXED else f"`{right.name}`"


def access_rows() -> str:
    """The topics that each service reads and writes, its groups, and its other rights, as rows."""
    rows = []
    for name, service in SERVICES.items():
        rights = [right for right in service.rights if right.name != DEPLOYMENT.name]
        groups = [right for right in rights if right.kind == GROUP]
        topics = [right for right in rights if right.kind != GROUP]
        cells = [
            ", ".join(named(right) for right in topics if one in right.operations) for one in (READ, WRITE)
        ]
        cells.append(", ".join(named(right) for right in groups if READ in right.operations))
        cells.append(
            "; ".join(
                f"{', '.join(others)} on {'group ' if right.kind == GROUP else ''}{named(right)}"
                for right in rights
                if (others := [each for each in right.operations if each not in {READ, WRITE}])
            )
        )
        rows.append(" ".join(["|", *(f"{cell} |" if cell else "|" for cell in (f"`{name}`", *cells))]))
    return "\n".join(rows) + "\n"


def missing_alerts() -> str:
    return " or\n".join(f'          absent(penstock_build_info{{service="{name}"}})' for name in SERVICES)


def present_series() -> str:
    # The case of the alert is that stages is missing.
    return "".join(
        f"      - series: 'penstock_build_info{{service=\"{name}\"}}'\n        values: '1x20'\n"
        for name in SERVICES
        if name != "stages"
    )


# By file and place: where a list of services is, as the only group of a pattern, and the list.
LISTS = {
    (".env.example", "passwords"): (
        r"(?<=^PENSTOCK_PASSWORD_OWNER=\n)((?:PENSTOCK_PASSWORD_\w+=\n)*)",
        "".join(f"{variable_of(name)}=\n" for name in SERVICES),
    ),
    ("docker-compose.yml", "allowed hosts"): (r"PENSTOCK_ALLOWED_HOSTS: (.*),\$", ",".join(SERVICES)),
    ("docker-compose.yml", "where"): (
        r"^  where:\n(?:    .*\n)*?    depends_on:\n((?:      .*\n)*)",
        "".join(f"      {name}: {{condition: service_healthy}}\n" for name in SERVICES),
    ),
    ("docs/deploy/containers.md", "with objects"): (
        r"^\| (.*) \| 2 each \| backend \| have",
        inside(objects=True, form="`{}`"),
    ),
    ("docs/deploy/containers.md", "without objects"): (
        r"^\| (.*) \| 2 each \| backend \| \|",
        inside(objects=False, form="`{}`"),
    ),
    ("docs/deploy/kafka.md", "access lists"): (
        r"^\| user \| reads .*\n\| ---.*\n((?:\| `.*\n)*?)(?=\| `worker`)",
        access_rows(),
    ),
    ("docs/deploy/kubernetes.md", "with objects"): (
        r"^\| (.*) \| `metricsFrom` \| DNS, Kafka, PostgreSQL, store \|",
        inside(objects=True),
    ),
    ("docs/deploy/kubernetes.md", "without objects"): (
        r"^\| (.*) \| `metricsFrom` \| DNS, Kafka, PostgreSQL \|",
        inside(objects=False),
    ),
    ("infra/helm/penstock/files/services.json", "all"): (r"\A([\s\S]*)\Z", chart_list()),
    ("infra/observability/alerts.test.yml", "present"): (
        r"((?:      - series: 'penstock_build_info\{service=.*\n        values: .*\n)+)",
        present_series(),
    ),
    **{
        (file, "missing"): (
            r"((?:          absent\(penstock_build_info.*\n)*          absent\(penstock_build_info.*)",
            missing_alerts(),
        )
        for file in ("infra/observability/alerts.yml", "infra/helm/penstock/files/alerts.yml")
    },
    ("infra/observability/prometheus.yml", "scraped"): (
        r"names: \[(.*)\]",
        ", ".join([*SERVICES, "worker"]),
    ),
}


@pytest.mark.parametrize(("file", "place"), LISTS)
def test_each_list_has_every_service(file: str, place: str) -> None:
    """O14: a list outside the code has the services of the table, in its order."""
    pattern, wanted = LISTS[file, place]
    text = (ROOT / file).read_text()
    found = re.search(pattern, text, re.MULTILINE)
    assert found, f"{file} has no list: {place}"
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        (ROOT / file).write_text(text[: found.start(1)] + wanted + text[found.end(1) :])
    else:
        assert found[1] == wanted, f"{file}, {place}: renew it with PENSTOCK_WRITE_DOCS=1"


@pytest.mark.parametrize("name", SERVICES)
def test_the_code_of_a_service_fits_the_table(name: str) -> None:
    """The package has the app under this name, which opens the object store if the table says so.
    Two services do not share a group, because each would read only a part of the records."""
    app: Any = importlib.import_module(f"penstock.{SERVICES[name].package}.app")
    assert name == app.NAME
    assert hasattr(app, "ObjectStore") == SERVICES[name].objects
    assert issubclass(settings_of(name), Platform)
    others = {group for other, service in SERVICES.items() if other != name for group in service.groups}
    assert not others & SERVICES[name].groups.keys()


def test_compose_runs_every_service() -> None:
    """O5: docker-compose.yml runs each service, with the volume of objects if it uses it."""
    containers = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    found = {
        container["command"][1]: (name, any("objects:" in volume for volume in container.get("volumes", [])))
        for name, container in containers.items()
        if container.get("command", [""])[0] == "run"
    }
    assert found == {name: (name, service.objects) for name, service in SERVICES.items()}


def test_the_chart_has_values_for_every_service() -> None:
    """O13: values.yaml and its schema have a section for each service."""
    sections = {section_of(name) for name in SERVICES}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    with_pods = {name for name, value in values.items() if isinstance(value, dict) and "pod" in value}
    assert with_pods == sections
    assert sections - schema.keys() == set()


def test_postgresql_has_a_role_for_every_service() -> None:
    """S10: roles.sql declares the role of each service, and the reader."""
    wanted = {f"penstock_{name.replace('-', '_')}" for name in SERVICES}
    assert set(roles.role_names()) == wanted | {"penstock_reader"}


def test_the_map_has_every_service() -> None:
    """O14: ARCHITECTURE.md says what each service writes."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.partition("| service | rows | topics |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([a-z][a-z-]*) \|", table, re.MULTILINE)
    assert set(rows) - {"worker"} == set(SERVICES)
