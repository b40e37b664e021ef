"""`make audit`: what is found fails, what could not be asked is said and does not, and neither
looks like the other."""

import importlib.util
import sys
from pathlib import Path

import pytest

INFRA = Path(__file__).parents[2] / "infra"
FOUND = {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
WELL = {"name": "b", "version": "1", "vulns": []}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


@pytest.fixture
def audit():
    found = importlib.util.spec_from_file_location("audit", INFRA / "audit.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def run(audit, tmp_path, capsys):
    """Runs the audit with stubbed programs; returns its status and output."""

    def program(name, text):
        file = tmp_path / name
        file.write_text(f"#!{sys.executable}\nimport json, sys\n{text}\n")
        file.chmod(0o755)

    def run(**answers):
        bom = "open(sys.argv[sys.argv.index('--output-file') + 1], 'w').write('{\"components\": [{}]}')"
        program("cyclonedx-py", bom)
        program(
            "pip-audit",
            f"answer = {answers!r}[sys.argv[sys.argv.index('--vulnerability-service') + 1]]\n"
            "if isinstance(answer, str):\n    sys.exit(answer)\n"
            "print(json.dumps({'dependencies': answer}))\n"
            "sys.exit(any(package.get('vulns') for package in answer))",
        )
        return audit.main(tmp_path, tmp_path / "sbom.json"), capsys.readouterr().out

    return run


def test_a_known_vulnerability_fails(run):
    """O12: the output has each package, its version, the vulnerability and the fixed version."""
    status, said = run(pypi=[FOUND, WELL], osv="not asked")
    assert status == 1
    assert "a 1: CVE-1, fixed in 2" in said


def test_a_clean_audit_says_so(run):
    """O12: the first service that answers decides; unknown packages are named."""
    status, said = run(pypi="no network", osv=[WELL, WELL, UNKNOWN])
    assert status == 0
    assert "osv knows 0 things against 2 packages" in said
    assert "c was not looked up" in said
    assert "NOT DONE" not in said


@pytest.mark.parametrize("answer", ["no network", [UNKNOWN, UNKNOWN], []])
def test_an_unreachable_service_is_not_a_clean_audit(run, answer):
    """O12: without a network or with an index without data, the audit passes and says why."""
    status, said = run(pypi=answer, osv="no network either")
    assert status == 0
    assert "audit: NOT DONE" in said
    assert "0 things" not in said


def test_the_audit_covers_the_image():
    """O12: it reads the image's requirements, all pinned by version and hash, like the tools'."""
    assert "infra/requirements.txt" in (INFRA / "Dockerfile").read_text()
    for name in ("requirements.txt", "audit.txt"):
        pinned = [line for line in (INFRA / name).read_text().splitlines() if line and line[0] not in " #"]
        assert pinned
        assert all("==" in line for line in pinned), name
    assert "sbom.json" in (INFRA.parent / ".gitignore").read_text()
