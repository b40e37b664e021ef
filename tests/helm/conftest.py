"""Helm itself, and the chart as it renders each set of values."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.rendered import CHART, KUBERNETES, Render

VERSION = "v3.19.5"
# As helm's own makefile does; a helm that is built without takes itself for one of Kubernetes 1.20.
_CAPABILITIES = "-X helm.sh/helm/v3/pkg/{0}.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/{0}.k8sVersionMinor=34"
KNOWN = " ".join(_CAPABILITIES.format(package) for package in ("chartutil", "lint/rules"))
VALUES = Path(__file__).parent / "values"


@pytest.fixture(scope="session")
def helm() -> str:
    """Helm: the one on the path, or else built once from its Go module into the cache, which takes a minute."""
    if found := shutil.which("helm"):
        return found
    cache_folder = Path(os.environ.get("PENSTOCK_CACHE") or Path.home() / ".cache" / "penstock")
    folder = cache_folder / f"helm-{VERSION}"
    built = folder / "helm"
    if not built.exists():
        go = shutil.which("go")
        if go is None:
            pytest.skip("neither helm nor go is installed: helm renders the chart, and go can build helm")
        folder.mkdir(parents=True, exist_ok=True)
        # Another process of this run, or another run, may be building it.
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                making = folder / "making"
                subprocess.run(
                    [go, "install", f"-ldflags={KNOWN}", f"helm.sh/helm/v3/cmd/helm@{VERSION}"],
                    env={**os.environ, "GOBIN": str(making)},
                    check=True,
                )
                # Only whole: whoever comes by without the lock takes what is there.
                (making / "helm").rename(built)
    return str(built)


@pytest.fixture(scope="session")
def render(helm: str, tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Renders the chart with a set of values by name, and others on top; each combination once."""
    # Helm writes to its home; nobody's own settings or plugins take part.
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
