"""Fixtures: helm, and the rendered chart for each set of values."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.built import build_helm, find_helm
from tests.helm.rendered import CHART, KUBERNETES, Render

VALUES = Path(__file__).parent / "values"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need helm are long: on a new machine it has to be built first, which takes
    minutes."""
    for item in items:
        if "helm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def helm() -> str:
    """Helm: the one on the path, or one that is built once from its Go module."""
    found = find_helm() or build_helm()
    if found is None:
        pytest.skip("neither helm nor go is installed: helm renders the chart, and go can build helm")
    return found


@pytest.fixture(scope="session")
def render(helm: str, tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Renders the chart with a named set of values and further options; each combination once."""
    # A separate home, without settings and plugins of the user.
    home = tmp_path_factory.mktemp("helm")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "HELM_NO_PLUGINS": "1"}

    def helm_template(name: str, *options: str, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
        values = ["--values", str(VALUES / f"{name}.yaml")]
        command = [
            helm,
            "template",
            "prod",
            str(chart),
            "--namespace",
            "tasks",
            *values,
            *options,
            *KUBERNETES,
        ]
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)

    @cache
    def objects(name: str, *options: str) -> list[dict[str, Any]]:
        ran = helm_template(name, *options)
        assert ran.returncode == 0, ran.stderr
        return [found for found in yaml.safe_load_all(ran.stdout) if found]

    return Render(objects=objects, run=helm_template, environment=environment)
