"""The base image: one variable names it everywhere, and it can be pinned."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "infra/Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
VARIABLE = re.compile(r"\$\{(?P<name>\w+):-(?P<default>[^}]+)\}")
DIGEST = "example/base:1@sha256:" + "0" * 64


def test_every_stage_uses_the_base_argument() -> None:
    """O13: the base of every stage can be pinned by an argument."""
    argument, *froms = re.findall(r"^(?:ARG|FROM) \S+(?: AS \w+)?$", DOCKERFILE, re.MULTILINE)
    assert argument == "ARG PYTHON_IMAGE=python:3.13-slim"
    assert froms
    stages: set[str] = set()
    for one in froms:
        _, base, _, name = one.split()
        assert base in {"${PYTHON_IMAGE}", *stages}, one
        stages.add(name)


def test_compose_takes_every_image_from_a_variable() -> None:
    """O13: each image has a tagged default, and .env.example lists it. The default of the base
    image is that of the Dockerfile."""
    listed = dict(re.findall(r"^#?([A-Z_]+_IMAGE)=(.+)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    named = {service["image"] for service in COMPOSE["services"].values()}
    (base,) = {
        service["build"]["args"]["PYTHON_IMAGE"]
        for service in COMPOSE["services"].values()
        if service.get("build", {}).get("dockerfile") == "infra/Dockerfile"
    }
    assert f"ARG PYTHON_IMAGE={VARIABLE.fullmatch(base)['default']}\n" in DOCKERFILE
    for image in (*named, base):
        found = VARIABLE.fullmatch(image)
        assert found, image
        assert ":" in found["default"], image
        if not found["default"].endswith(":local"):
            assert listed[found["name"]] == found["default"]


@pytest.mark.parametrize("where", ["environment", "file", "nowhere"])
def test_make_uses_the_configured_base(where: str, tmp_path: Path) -> None:
    """O13: `make images` takes the base from the same variable as compose, from the
    environment or .env."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for prerequisite in ("constraints.txt", "pyproject.toml"):
        (tmp_path / prerequisite).touch()
    (tmp_path / "services" / "console").mkdir(parents=True)
    if where == "file":
        (tmp_path / ".env").write_text(f"PENSTOCK_API_KEY=pk\nPENSTOCK_PYTHON_IMAGE={DIGEST}\n")
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    if where == "environment":
        environment["PENSTOCK_PYTHON_IMAGE"] = DIGEST
    ran = subprocess.run(
        ["make", "--dry-run", "images"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    built = [line for line in ran.stdout.splitlines() if "infra/Dockerfile" in line]
    base = "python:3.13-slim" if where == "nowhere" else DIGEST
    assert len(built) == 2
    assert all(f" --build-arg PYTHON_IMAGE={base} " in line for line in built)
