"""How long a stop takes at most: by the code, on the page that operators read, and in the
compose file."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.callback_targets import SECRET

from penstock import process
from penstock.gateway.app import STOP_S
from penstock.kafka.topology.services import SERVICES
from penstock.worker import Worker, WorkerSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy" / "operations.md"
OBJECTS = "memory:///"
GRACE_S = inspect.signature(process.run).parameters["grace_s"].default
DRAIN_S = WorkerSettings(objects=OBJECTS).drain_timeout_s


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds from SIGTERM to the forced end of each service and of a worker, as each gives them
    to `process.run`."""
    found: dict[str, float] = {}

    def run(name: str, _service: object, *, grace_s: float = GRACE_S, **_others: Any) -> int:
        found[name] = grace_s + process.EXIT_TIMEOUT_S
        return 0

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setenv("PENSTOCK_OBJECTS", OBJECTS)
    monkeypatch.setenv("PENSTOCK_CALLBACK_SECRETS", SECRET)
    for service in SERVICES.values():
        importlib.import_module(f"penstock.{service.package}.app").main()
    with pytest.raises(SystemExit):
        Worker(WorkerSettings(objects=OBJECTS)).run()
    return found


def test_the_page_has_the_budgets_of_the_code(budgets: dict[str, float]) -> None:
    """O11: operators read how long a stop may take, in all and in its parts."""
    found = re.findall(r"^\| ([a-z -]+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    page = {name: [int(text) for text in re.findall(r"\b(\d+) s\b", cells)] for name, cells in found}
    wanted = {name: [GRACE_S, process.EXIT_TIMEOUT_S, budgets[name]] for name in SERVICES}
    wanted["gateway"].insert(1, STOP_S)
    wanted["worker"] = [
        DRAIN_S,
        budgets["worker"] - DRAIN_S - process.EXIT_TIMEOUT_S,
        process.EXIT_TIMEOUT_S,
        budgets["worker"],
    ]
    assert {name: page.get(name, page["each other service"]) for name in wanted} == wanted


def test_the_compose_file_gives_that_long(budgets: dict[str, float]) -> None:
    """O11: the compose file kills no container that would still have ended by itself."""
    # safe_load merges the anchors.
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    given = {name: int(services[name]["stop_grace_period"].removesuffix("s")) for name in budgets}
    assert {name: given[name] for name in budgets if given[name] < budgets[name]} == {}
