"""The values that the chart refuses, and the chart's README with all values.

PENSTOCK_WRITE_DOCS=1 pytest tests/helm/test_values.py    regenerates
infra/helm/penstock/README.md and the alerts.
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

# By case: options besides the minimal values, and the expected part of the error.
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
    "oidc without issuer": (
        ["gateway.auth=oidc"],
        "gateway.oidc.issuer and gateway.oidc.audience must be given",
    ),
    "misspelt": (["gatway.replicas=3"], "gatway"),
    "misspelt in an object": (["gateway.replica=3"], "replica"),
    "no number": (["stages.replicas=two"], "/stages/replicas"),
    "negative": (["stages.replicas=-1"], "/stages/replicas"),
    "brokers with a scheme": (["kafka.bootstrapServers=kafka://a:9092"], "/kafka/bootstrapServers"),
    "unknown protocol": (["kafka.protocol=TLS"], "/kafka/protocol"),
    "empty prefix": (["prefix="], "/prefix"),
    "other store": (["objects.url=gs://bucket"], "/objects/url"),
    "short grace period": (
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
    "sasl unused": (
        ["kafka.sasl.mechanism=PLAIN"],
        "kafka.sasl is given but kafka.protocol is PLAINTEXT",
    ),
    "tls unused": (["kafka.tls.caSecret.name=a"], "kafka.tls is given but kafka.protocol is PLAINTEXT"),
    "error of one service": (
        ["stages.kafka.protocol=SASL_SSL"],
        "stages: kafka.protocol is SASL_SSL, so kafka.sasl.mechanism must be given",
    ),
    "authority unused": (["postgres.caSecret.name=a", "postgres.sslmode=require"], "make it verify-full"),
    "folder without claim": (["objects.url=file:///objects"], "objects.existingClaim must name a claim"),
    "secret in a value": (
        ["callbacks.extraEnv[0].name=API_TOKEN", "callbacks.extraEnv[0].value=abc"],
        "callbacks: extraEnv API_TOKEN has a value: give valueFrom.secretKeyRef",
    ),
    "set by the chart": (
        ["stages.extraEnv[0].name=PENSTOCK_KAFKA", "stages.extraEnv[0].value=a:1"],
        "stages: extraEnv has PENSTOCK_KAFKA twice, or the chart sets it",
    ),
    "ingress for all hosts": (["gateway.ingress.enabled=true"], "gateway.ingress.hosts is empty"),
    "route without parent": (["gateway.httpRoute.enabled=true"], "gateway.httpRoute.parentRefs is empty"),
    "worker without type": (["workers[0].name=a", "workers[0].image=a:1"], "type"),
    "worker's image without tag": ([*WORKER[:2], "workers[0].image=a"], "/workers/0/image"),
    "worker's type": ([*WORKER, "workers[0].type=a.b"], "/workers/0/type"),
    "name twice": (
        [*WORKER, *(each.replace("[0]", "[1]") for each in WORKER)],
        "workers: the name a is given twice",
    ),
    "keda without pool": ([*WORKER, "workers[0].keda.enabled=true"], "worker-a: keda needs pool"),
    "keda via the gateway": (
        [
            *WORKER,
            "workers[0].pool=1",
            "workers[0].keda.enabled=true",
            "workers[0].viaGateway=true",
            "workers[0].apiKeySecret.name=a",
        ],
        "worker-a: keda needs a worker that reads Kafka",
    ),
    "minimum above maximum": (
        [*WORKER, "workers[0].pool=1", "workers[0].keda.enabled=true", "workers[0].keda.minReplicas=9"],
        "keda.minReplicas=9 is above keda.maxReplicas=8",
    ),
    "grace period of a worker": (
        [*WORKER, "workers[0].pod.terminationGracePeriodSeconds=600"],
        "worker-a: pod.terminationGracePeriodSeconds follows from drainTimeoutSeconds",
    ),
    "no key for the gateway": ([*WORKER, "workers[0].viaGateway=true"], "viaGateway needs apiKeySecret"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_values_are_refused(render: Render, case: str) -> None:
    """O13: invalid values are refused, and the error names the value."""
    settings, message = REFUSED[case]
    ran = render.run("minimal", *(f"--set={each}" for each in settings))
    assert ran.returncode != 0
    assert message in ran.stderr.replace("'", "/"), ran.stderr


def notes_of(render: Render, folder: Path, *options: str) -> str:
    """Renders the notes after an install with the minimal values.

    Helm prints notes only with a cluster, so the test renders them as the text of an object.
    """
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


def test_notes_explain_the_next_steps(render: Render, tmp_path: Path) -> None:
    """O13: the notes explain how to reach the gateway and how to create a key, and list
    disabled parts."""
    default_notes = notes_of(render, tmp_path)
    assert "kubectl --namespace tasks port-forward service/prod-penstock-gateway 8420:8420" in default_notes
    assert "exec deployment/prod-penstock-gateway -- penstock keys create NAME --role" in default_notes
    assert "is false" not in default_notes
    public_notes = notes_of(
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
    assert "https://tasks.example.com" in public_notes
    assert "port-forward" not in public_notes
    assert "keys create" not in public_notes
    assert public_notes.count("is false") == 3


def described_values() -> Iterator[tuple[str, Any, str]]:
    """Yields path, default and comment of every value with a comment in values.yaml."""
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()
    values = yaml.safe_load(text)

    def walk(
        node: yaml.MappingNode, path: tuple[str, ...], documented: bool
    ) -> Iterator[tuple[str, Any, str]]:
        for key, value in node.value:
            full_path = (*path, key.value)
            comment = lines[key.start_mark.line - 1].strip()
            found = re.fullmatch(r"# -- (.+)", comment) if node.flow_style is not True else None
            if found:
                default = values
                for part in full_path:
                    default = default[part]
                yield ".".join(full_path), default, found[1]
            if isinstance(value, yaml.MappingNode) and value.value:
                yield from walk(value, full_path, documented or bool(found))
            else:
                assert documented or found, f"{'.'.join(full_path)} has no comment in values.yaml"

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from walk(root, (), documented=False)


def shown(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def tables() -> str:
    """The tables of README.md: all values, then the keys of a worker."""
    definitions = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    rows = ["| value | default | |", "| --- | --- | --- |"]
    rows += [f"| `{path}` | {shown(default)} | {comment} |" for path, default, comment in described_values()]
    for title, name in (("Each of `workers`", "worker"), ("`keda` of a worker", "keda")):
        rows += ["", f"## {title}", "", "| value | |", "| --- | --- |"]
        rows += [
            f"| `{key}` | {each['description']} |" for key, each in definitions[name]["properties"].items()
        ]
    return "\n".join(rows) + "\n"


def test_the_readme_documents_every_value() -> None:
    """O13: the chart's README has every value with its default and its description."""
    before = README.read_text().partition(MARK)[0] if README.exists() else ""
    wanted = f"{before}{MARK}\n\n{tables()}"
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        README.write_text(wanted)
    assert README.read_text() == wanted


def test_the_schema_has_every_value() -> None:
    """O13: every object of the schema refuses unknown keys, and the schema has every value
    of values.yaml."""
    file, values = CHART / "values.schema.json", yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads(file.read_text())
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        # A new service has the values that all services have.
        service = {"$ref": "#/definitions/service"}
        schema["properties"] = {**dict.fromkeys(values, service), **schema["properties"]}
        file.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")

    def check_closed(node: Any, where: str) -> None:
        if isinstance(node, dict):
            if "properties" in node:
                assert node.get("additionalProperties") is False, where
            for key, value in node.items():
                check_closed(value, f"{where}/{key}")

    check_closed(schema, "")
    assert set(values) == set(schema["properties"]) - {"global"}


def test_alerts_equal_those_of_the_tree(render: Render) -> None:
    """O13: the PrometheusRule has the chart's copy of the alerts, which equals
    infra/observability."""
    copy = CHART / "files" / "alerts.yml"
    # A packaged tree may lack the original.
    if ALERTS.exists():
        if os.environ.get("PENSTOCK_WRITE_DOCS"):
            copy.write_text(ALERTS.read_text())
        assert copy.read_text() == ALERTS.read_text()
    (rule,) = of_kind(render.objects("everything"), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.safe_load(copy.read_text())
    assert rule["spec"]["groups"]
