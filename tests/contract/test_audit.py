"""`make audit`: what is found fails, what could not be asked is said and does not, and neither looks like the other."""

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
    """Runs it with programs that answer as told; the status and what was said."""

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


def test_what_is_known_against_a_version_fails(run):
    """O12: each package, its version, what is known and where it is mended."""
    status, said = run(pypi=[FOUND, WELL], osv="not asked")
    assert status == 1
    assert "a 1: CVE-1, fixed in 2" in said


def test_what_is_well_is_said_to_be(run):
    """O12: by the first service that answers; a package that it does not know is named."""
    status, said = run(pypi="no network", osv=[WELL, WELL, UNKNOWN])
    assert status == 0
    assert "osv knows 0 things against 2 packages" in said
    assert "c was not looked up" in said
    assert "NOT DONE" not in said


@pytest.mark.parametrize("answer", ["no network", [UNKNOWN, UNKNOWN], []])
def test_what_could_not_be_asked_is_no_clean_bill(run, answer):
    """O12: no network, and an index that knows none of the packages, fail nothing and are called what they are."""
    status, said = run(pypi=answer, osv="no network either")
    assert status == 0
    assert "audit: NOT DONE" in said
    assert "0 things" not in said


def test_the_image_is_what_is_audited():
    """O12: the requirements that the image installs, every one by version and hash; the tools likewise."""
    assert "infra/requirements.txt" in (INFRA / "Dockerfile").read_text()
    for name in ("requirements.txt", "audit.txt"):
        pinned = [line for line in (INFRA / name).read_text().splitlines() if line and line[0] not in " #"]
        assert pinned
        assert all("==" in line for line in pinned), name
    assert "sbom.json" in (INFRA.parent / ".gitignore").read_text()
