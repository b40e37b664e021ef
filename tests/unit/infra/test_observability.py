"""infra/observability: its metrics exist, Prometheus accepts it, and the runbook has every
alert."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import prometheus_client
import pytest
import yaml

from penstock import metrics
from penstock.cli.main import cli
from penstock.kafka.topology.services import SERVICES

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "infra" / "observability"
RUNBOOK = ROOT / "docs" / "deploy" / "runbook.md"

# Labels that Prometheus adds to every series.
TARGET_LABELS = {"job", "instance"}

_SELECTOR = re.compile(r"\b((?:penstock|process)_[a-z_]+)\b(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "dashboard.json").read_text())


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


EXPRESSIONS = [("alert " + rule["alert"], rule["expr"]) for rule in alerts()] + [
    (f"panel {panel['title']}", target["expr"]) for panel in panels() for target in panel["targets"]
]
EXPRESSIONS.append(("variable type", dashboard()["templating"]["list"][1]["query"]["query"]))


def exported_series() -> dict[str, set[str]]:
    """Returns every series that processes export, with its labels."""
    found: dict[str, set[str]] = {}
    for metric in metrics.ALL:
        labels = set(metric.labels) | TARGET_LABELS
        if metric.kind == "histogram":
            found[metric.name + "_bucket"] = {*labels, "le"}
            found[metric.name + "_sum"] = found[metric.name + "_count"] = labels
        else:
            found[metric.name] = labels
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    found |= {sample.name: TARGET_LABELS for family in registry.collect() for sample in family.samples}
    return found


def problems(expression: str) -> list[str]:
    """Returns the metrics and labels of an expression that no process exports."""
    series = exported_series()
    found, labels = [], set()
    for name, selector in _SELECTOR.findall(expression):
        if name not in series:
            found.append(f"no metric {name}")
            continue
        labels |= series[name]
        asked = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)
        found += [f"{name} has no label {label}" for label in asked if label not in series[name]]
    for group in _GROUPING.findall(expression):
        for label in (part.strip() for part in group.split(",")):
            if label and labels and label not in labels:
                found.append(f"nothing here has a label {label}")
    return found


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_every_metric_and_label_that_is_named_exists(where: str, expression: str) -> None:
    """O4: a dashboard or alert on an unknown metric would stay empty and silent."""
    assert _SELECTOR.search(expression) or "up{" in expression, f"{where} asks for nothing"
    assert problems(expression) == []


@pytest.mark.parametrize(
    "expression",
    [
        "penstock_nothing",
        'penstock_leases{nowhere="x"}',
        "sum by (kind) (penstock_leases)",
        "penstock_attempt_seconds",
    ],
)
def test_an_unknown_name_is_detected(expression: str) -> None:
    """The test above detects unknown metrics and labels, and histograms without a suffix."""
    assert problems(expression)


def test_every_metric_is_on_the_dashboard() -> None:
    """A panel shows each metric."""
    shown = " ".join(expression for where, expression in EXPRESSIONS if where.startswith("panel"))
    assert [metric.name for metric in metrics.ALL if metric.name not in shown] == []


def test_the_dashboard_can_be_laid_out() -> None:
    """Each panel has its own id and position, a description, and the chosen data source."""
    board = dashboard()
    places = [(panel["gridPos"], panel["title"]) for panel in board["panels"]]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: dict[tuple[int, int], str] = {}
    for place, title in places:
        assert place["x"] + place["w"] <= 24, title
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), title) == title
    for panel in panels():
        assert len(panel["description"]) > 15, panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


@pytest.mark.parametrize("rule", alerts(), ids=[rule["alert"] for rule in alerts()])
def test_every_alert_has_an_entry_in_the_runbook(rule: dict[str, Any]) -> None:
    """O4: each alert links an entry with its meaning, where to look and what to do."""
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert ROOT / page == RUNBOOK
    entries = dict(
        re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(), re.DOTALL | re.MULTILINE)
    )
    assert anchor == rule["alert"].lower()
    entry = entries[rule["alert"]]
    assert entry.startswith(f"*{rule['labels']['severity'].capitalize()}.* ")
    assert "**Look.** " in entry
    assert "**Do.** " in entry


def test_the_runbook_has_no_entry_without_an_alert() -> None:
    """Runbook and alerts have the same order, so a change of one shows in the other."""
    entries = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert entries == [rule["alert"] for rule in alerts()]


def test_names_in_the_runbook_exist() -> None:
    """Verbs, metrics and settings in the runbook exist."""
    text = RUNBOOK.read_text()
    for words in re.findall(r"`penstock ([a-z ]+)", text):
        verb: click.Command = cli
        for word in words.split():
            assert isinstance(verb, click.Group), words
            below = verb.get_command(click.Context(verb), word)
            assert below is not None, f"penstock {words}"
            verb = below
    names = {metric.name for metric in metrics.ALL}
    assert [name for name in re.findall(r"`(penstock_\w+)", text) if name not in names] == []
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert [name for name in re.findall(r"PENSTOCK_\w+", text) if f"`{name}`" not in reference] == []


def test_every_service_is_scraped() -> None:
    """prometheus.yml scrapes every service and the workers, each replica, on the metrics port. The
    name of a job is that of its service, as the alerts expect."""
    [job] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    [found] = job["dns_sd_configs"]
    assert (found["names"], found["type"], found["port"]) == ([*SERVICES, "worker"], "A", 9100)
    [rule] = job["relabel_configs"]
    assert rule == {"source_labels": ["__meta_dns_name"], "target_label": "job", "replacement": "penstock-$1"}


def test_every_alert_has_a_case() -> None:
    """alerts.test.yml has a case for each alert, in which it fires."""
    cases = yaml.safe_load((FOLDER / "alerts.test.yml").read_text())["tests"]
    fires = {one["alertname"] for case in cases for one in case["alert_rule_test"] if one.get("exp_alerts")}
    assert fires == {rule["alert"] for rule in alerts()}


def promtool(*arguments: str, folder: Path = FOLDER) -> str:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is missing: it is in Debian's package prometheus")
    done = subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_the_configuration() -> None:
    """O4: promtool accepts the scrape configuration and the rules."""
    # Without looking for the token's file, which only the container has.
    promtool("check", "config", "--syntax-only", "prometheus.yml")
    assert f"{len(alerts())} rules found" in promtool("check", "rules", "alerts.yml")


def test_every_alert_fires_on_its_condition() -> None:
    """O4: on its test series each alert fires with its labels and summary, and not before."""
    promtool("test", "rules", "alerts.test.yml")


def test_prometheus_parses_the_dashboard(tmp_path: Path) -> None:
    """Prometheus can parse each expression of a panel."""
    asked = [expression for where, expression in EXPRESSIONS if where.startswith("panel")]
    rules = [
        {
            "record": f"panel:expression{number}",
            "expr": expression.replace("$__rate_interval", "5m").replace("$type", ".*"),
        }
        for number, expression in enumerate(asked)
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", "rules.yml", folder=tmp_path)
