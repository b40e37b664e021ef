"""What the chart refuses, and that its README tells of every value.

PENSTOCK_WRITE_DOCS=1 pytest tests/helm/test_values.py    renews infra/helm/penstock/README.md, and the alerts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.rendered import CHART, Render, of_kind

README = CHART / "README.md"
ALERTS = Path(__file__).parents[2] / "infra" / "observability" / "alerts.yml"
MARK = "<!-- made by tests/helm/test_values.py -->"

SASL = ("kafka.protocol=SASL_SSL", "kafka.sasl.mechanism=SCRAM-SHA-512")
WORKER = ("workers[0].name=a", "workers[0].type=a", "workers[0].image=a:1")

# What is set on top of the minimal values, and what helm must say of it.
REFUSED = {
    "no image": (["image.repository="], "image.repository is empty"),
    "no brokers": (["kafka.bootstrapServers="], "kafka.bootstrapServers is empty"),
    "no database": (["postgres.url.name="], "postgres.url.name is empty"),
    "no store": (["objects.url="], "objects.url is empty"),
    "no callback secrets": (["callbacks.secrets.name="], "callbacks.secrets.name is empty"),
    "auth off": (
        ["gateway.auth=off"],
        'gateway.auth is "off": in a cluster the gateway listens beyond loopback',
    ),
    "auth unknown": ([r"gateway.auth=keys\,basic"], r'gateway.auth is "keys,basic"'),
    "oidc by nobody": (["gateway.auth=oidc"], "gateway.oidc.issuer and gateway.oidc.audience must be given"),
    "misspelt": (["gatway.replicas=3"], "gatway"),
    "misspelt within": (["gateway.replica=3"], "replica"),
    "no number": (["stages.replicas=two"], "/stages/replicas"),
    "negative": (["stages.replicas=-1"], "/stages/replicas"),
    "brokers with a scheme": (["kafka.bootstrapServers=kafka://a:9092"], "/kafka/bootstrapServers"),
    "unknown protocol": (["kafka.protocol=TLS"], "/kafka/protocol"),
    "empty prefix": (["prefix="], "/prefix"),
    "other store": (["objects.url=gs://bucket"], "/objects/url"),
    "too little time to end": (
        ["defaults.terminationGracePeriodSeconds=30"],
        "/defaults/terminationGracePeriodSeconds",
    ),
    "no memory": (["defaults.resources.limits.memory=lots"], "/defaults/resources/limits/memory"),
    "port": (["metrics.port=70000"], "/metrics/port"),
    "no network": (["callbacks.allow[0]=10.0.0.1"], "/callbacks/allow/0"),
    "sasl without mechanism": (["kafka.protocol=SASL_SSL"], "kafka.sasl.mechanism must be given"),
    "sasl without password": ([*SASL, "kafka.sasl.user=a"], "needs kafka.sasl.passwordSecret.name"),
    "two users": (
        [*SASL, "kafka.sasl.user=a", "kafka.sasl.userSecret.name=b", "kafka.sasl.passwordSecret.name=c"],
        "exclude each other",
    ),
    "oauth half": (
        ["kafka.protocol=SASL_SSL", "kafka.sasl.mechanism=OAUTHBEARER", "kafka.sasl.oauth.clientId=a"],
        "needs kafka.sasl.oauth.tokenUrl",
    ),
    "sasl for nothing": (
        ["kafka.sasl.mechanism=PLAIN"],
        "kafka.sasl is given but kafka.protocol is PLAINTEXT",
    ),
    "tls for nothing": (["kafka.tls.caSecret.name=a"], "kafka.tls is given but kafka.protocol is PLAINTEXT"),
    "one service's fault": (
        ["stages.kafka.protocol=SASL_SSL"],
        "stages: kafka.protocol is SASL_SSL, so kafka.sasl.mechanism must be given",
    ),
    "authority unused": (["postgres.caSecret.name=a", "postgres.sslmode=require"], "make it verify-full"),
    "folder of a pod": (["objects.url=file:///objects"], "objects.existingClaim must name a claim"),
    "secret in a value": (
        ["callbacks.extraEnv[0].name=API_TOKEN", "callbacks.extraEnv[0].value=abc"],
        "callbacks: extraEnv API_TOKEN has a value: give valueFrom.secretKeyRef",
    ),
    "set by the chart": (
        ["stages.extraEnv[0].name=PENSTOCK_KAFKA", "stages.extraEnv[0].value=a:1"],
        "stages: extraEnv has PENSTOCK_KAFKA twice, or the chart sets it",
    ),
    "ingress for all hosts": (["gateway.ingress.enabled=true"], "gateway.ingress.hosts is empty"),
    "route to nowhere": (["gateway.httpRoute.enabled=true"], "gateway.httpRoute.parentRefs is empty"),
    "worker without type": (["workers[0].name=a", "workers[0].image=a:1"], "type"),
    "worker's image without tag": ([*WORKER[:2], "workers[0].image=a"], "/workers/0/image"),
    "worker's type": ([*WORKER, "workers[0].type=a.b"], "/workers/0/type"),
    "two of a name": (
        [*WORKER, *(each.replace("[0]", "[1]") for each in WORKER)],
        "workers: the name a is given twice",
    ),
    "scaled by no pool": ([*WORKER, "workers[0].keda.enabled=true"], "worker-a: keda needs pool"),
    "scaled by the gateway": (
        [
            *WORKER,
            "workers[0].pool=1",
            "workers[0].keda.enabled=true",
            "workers[0].viaGateway=true",
            "workers[0].apiKeySecret.name=a",
        ],
        "worker-a: keda needs a worker that reads Kafka",
    ),
    "least above most": (
        [*WORKER, "workers[0].pool=1", "workers[0].keda.enabled=true", "workers[0].keda.minReplicas=9"],
        "keda.minReplicas=9 is above keda.maxReplicas=8",
    ),
    "a worker's grace": (
        [*WORKER, "workers[0].pod.terminationGracePeriodSeconds=600"],
        "worker-a: pod.terminationGracePeriodSeconds follows from drainTimeoutSeconds",
    ),
    "no key for the gateway": ([*WORKER, "workers[0].viaGateway=true"], "viaGateway needs apiKeySecret"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused(render: Render, case: str) -> None:
    """Issue 7: values that make no sense are refused, and what is said names the value at fault."""
    settings, said = REFUSED[case]
    ran = render.run("minimal", *(f"--set={each}" for each in settings))
    assert ran.returncode != 0
    assert said in ran.stderr.replace("'", "/"), ran.stderr


def notes_of(render: Render, folder: Path, *options: str) -> str:
    """What helm tells after an install with the minimal values; it shows that to clusters alone, so here it is an object's text."""
    chart = folder / "penstock"
    if not chart.exists():
        shutil.copytree(CHART, chart)
        notes = (chart / "templates" / "NOTES.txt").read_text()
        (chart / "templates" / "_notes.tpl").write_text('{{ define "notes" }}' + notes + "{{ end }}")
        (chart / "templates" / "notes.yaml").write_text('notes: |\n  {{- include "notes" . | nindent 2 }}\n')
    shown = ("--show-only=templates/notes.yaml", *(f"--set={each}" for each in options))
    ran = render.run("minimal", *shown, chart=chart)
    assert ran.returncode == 0, ran.stderr
    text: str = yaml.safe_load(ran.stdout)["notes"]
    return text


def test_notes(render: Render, tmp_path: Path) -> None:
    """Issue 7: after an install helm says how to reach the gateway, how to make a key, and what has been left out."""
    plain = notes_of(render, tmp_path)
    assert "kubectl --namespace tasks port-forward service/prod-penstock-gateway 8420:8420" in plain
    assert "exec deployment/prod-penstock-gateway -- penstock keys create NAME --role" in plain
    assert "is false" not in plain
    published = notes_of(
        render,
        tmp_path,
        "gateway.ingress.enabled=true",
        "gateway.ingress.hosts[0]=tasks.example.com",
        "gateway.ingress.tlsSecret=tls",
        "gateway.auth=oidc",
        "gateway.oidc.issuer=https://login.example.com",
        "gateway.oidc.audience=penstock",
        "migrate.enabled=false",
        "topics.enabled=false",
        "networkPolicy.enabled=false",
    )
    assert "https://tasks.example.com" in published
    assert "port-forward" not in published
    assert "keys create" not in published
    assert published.count("is false") == 3


def described() -> Iterator[tuple[str, Any, str]]:
    """Every value with a comment of its own in values.yaml: its path, default and comment."""
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()
    values = yaml.safe_load(text)

    def walk(node: yaml.MappingNode, path: tuple[str, ...], told: bool) -> Iterator[tuple[str, Any, str]]:
        for key, value in node.value:
            here = (*path, key.value)
            comment = lines[key.start_mark.line - 1].strip()
            found = re.fullmatch(r"# -- (.+)", comment) if node.flow_style is not True else None
            if found:
                default = values
                for part in here:
                    default = default[part]
                yield ".".join(here), default, found[1]
            if isinstance(value, yaml.MappingNode) and value.value:
                yield from walk(value, here, told or bool(found))
            else:
                assert told or found, f"{'.'.join(here)} has no comment in values.yaml"

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from walk(root, (), told=False)


def shown(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def tables() -> str:
    """The tables of README.md: all values, then what a worker may have."""
    definitions = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    rows = ["| value | default | |", "| --- | --- | --- |"]
    rows += [f"| `{path}` | {shown(default)} | {comment} |" for path, default, comment in described()]
    for title, name in (("Each of `workers`", "worker"), ("`keda` of a worker", "keda")):
        rows += ["", f"## {title}", "", "| value | |", "| --- | --- |"]
        rows += [
            f"| `{key}` | {each['description']} |" for key, each in definitions[name]["properties"].items()
        ]
    return "\n".join(rows) + "\n"


def test_readme_tells_of_every_value() -> None:
    """Issue 7: the chart's README has every value, its default and what it means."""
    before = README.read_text().partition(MARK)[0] if README.exists() else ""
    wanted = f"{before}{MARK}\n\n{tables()}"
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        README.write_text(wanted)
    assert README.read_text() == wanted


def test_the_schema_knows_every_value() -> None:
    """Issue 7: every object of the schema refuses keys it does not know, and every value of values.yaml is one it knows."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def closed(node: Any, where: str) -> None:
        if isinstance(node, dict):
            if "properties" in node:
                assert node.get("additionalProperties") is False, where
            for key, value in node.items():
                closed(value, f"{where}/{key}")

    closed(schema, "")
    assert set(yaml.safe_load((CHART / "values.yaml").read_text())) == set(schema["properties"]) - {"global"}


def test_alerts_are_those_of_the_tree(render: Render) -> None:
    """Issue 7: the PrometheusRule has the chart's copy of the alerts, which is that of infra/observability, word for word."""
    copy = CHART / "files" / "alerts.yml"
    # Where the alerts are not in the tree, there is nothing for the copy to be equal to.
    if ALERTS.exists():
        if os.environ.get("PENSTOCK_WRITE_DOCS"):
            copy.write_text(ALERTS.read_text())
        assert copy.read_text() == ALERTS.read_text()
    (rule,) = of_kind(render.objects("everything"), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.safe_load(copy.read_text())
    assert rule["spec"]["groups"]
