"""The image's bill of materials and vulnerabilities: `python infra/audit.py BIN [SBOM]`.

BIN is the folder with cyclonedx-py and pip-audit. The script writes a CycloneDX bill of materials
from infra/requirements.txt. It then queries vulnerability services for the pinned versions, in turn
until one answers. Exit statuses:

    0   no vulnerability is known, or no service could be reached (a line says so)
    1   vulnerabilities are known; each is printed with its package and version
    2   the bill of materials could not be written
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
SERVICES = ("pypi", "osv")


def audited(pip_audit: Path, service: str) -> tuple[list[dict[str, Any]] | None, str]:
    """Returns one service's findings by package; None and the reason when the query failed."""
    done = subprocess.run(  # noqa: S603 (the pinned program, our own arguments)
        [
            pip_audit,
            *("--requirement", REQUIREMENTS, "--disable-pip", "--vulnerability-service", service),
            *("--format", "json", "--progress-spinner", "off", "--timeout", "15"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    # pip-audit exits with the same status for findings and failures; only a finished audit has a
    # document.
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines()
        return None, said[-1][:300] if said else f"status {done.returncode}"
    # An index without vulnerability data answers as if it knew no package, and pip-audit reports
    # success.
    unknown = [package for package in packages if "skip_reason" in package]
    if 2 * len(unknown) > len(packages) or not packages:
        return None, f"it knows {len(packages) - len(unknown)} of {len(packages)} packages"
    return packages, ""


def main(binaries: Path, sbom: Path) -> int:
    """Runs the audit and returns the exit status."""
    made = subprocess.run(  # noqa: S603 (the pinned program, our own arguments)
        [
            binaries / "cyclonedx-py",
            *("requirements", REQUIREMENTS, "--spec-version", "1.6", "--output-reproducible"),
            *("--output-format", "JSON", "--output-file", sbom),
        ],
        check=False,
    )
    if made.returncode:
        print(f"audit: {sbom} could not be written", file=sys.stderr)
        return 2
    print(f"audit: {sbom} lists {len(json.loads(sbom.read_text())['components'])} packages")
    reasons = []
    for service in SERVICES:
        packages, reason = audited(binaries / "pip-audit", service)
        if packages is None:
            reasons.append(f"{service}: {reason}")
            continue
        skipped = [p for p in packages if "skip_reason" in p]
        found = [(p["name"], p["version"], v) for p in packages for v in p.get("vulns", ())]
        for name, version, known in found:
            fixed = ", ".join(known["fix_versions"]) or "no version yet"
            print(f"audit: {name} {version}: {known['id']}, fixed in {fixed}")
        for package in skipped:
            print(f"audit: {package['name']} was not looked up: {package['skip_reason']}")
        print(f"audit: {service} knows {len(found)} things against {len(packages) - len(skipped)} packages")
        return 1 if found else 0
    print("audit: NOT DONE, no vulnerability service could be reached: " + "; ".join(reasons))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "sbom.json")))
