"""How long SIGTERM takes at most: as docs/deploy/operations.md tells it, and as deployments must allow for it."""

import inspect
import re
from pathlib import Path

import yaml

from penstock import process
from penstock.gateway.app import STOP_S
from penstock.local.deployment import SERVICES
from penstock.worker import app as worker
from penstock.worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy" / "operations.md"
GRACE_S = inspect.signature(process.run).parameters["grace_s"].default


def rows() -> dict[str, list[str]]:
    found = re.findall(r"^\| ([a-z-]+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in found if name in (*SERVICES, "worker")}


def test_the_page_tells_the_budgets_of_the_code():
    """O11: each service's and the worker's; none has a budget of its own that the page does not know."""
    drain_s = WorkerSettings(objects="memory:///").drain_timeout_s
    assert "grace_s=drain_s + 15)" in inspect.getsource(worker)
    wanted = {
        name: [f"{GRACE_S:.0f} s", f"{process.LEAVE_S:.0f} s", f"{GRACE_S + process.LEAVE_S:.0f} s"]
        for name in SERVICES
    }
    wanted["gateway"][0] += f", answers under way {STOP_S:.0f} s of it"
    wanted["worker"] = [
        f"`PENSTOCK_DRAIN_TIMEOUT_S` ({drain_s:.0f} s) + 15 s",
        f"{process.LEAVE_S:.0f} s",
        f"{drain_s + 15 + process.LEAVE_S:.0f} s",
    ]
    assert rows() == wanted
    apps = [ROOT / "services" / "penstock" / name.replace("-", "_") / "app.py" for name in SERVICES]
    assert not [app for app in apps if "grace_s" in app.read_text()]


def test_the_compose_file_gives_that_long():
    """O11: what is shipped for containers kills nothing that would still have ended by itself."""
    # safe_load merges the anchors.
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    drain_s = WorkerSettings(objects="memory:///").drain_timeout_s
    budgets = dict.fromkeys(SERVICES, GRACE_S + process.LEAVE_S) | {"worker": drain_s + 15 + process.LEAVE_S}
    given = {name: int(services[name]["stop_grace_period"].removesuffix("s")) for name in budgets}
    assert {name: given[name] for name in budgets if given[name] < budgets[name]} == {}
