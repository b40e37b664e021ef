"""Helm, built from its Go module: `python -m tests.helm.built` builds it ahead of the tests.

The program is in the cache folder outside the tree (PENSTOCK_CACHE), with its version in the name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

VERSION = "v3.19.5"
# As in helm's makefile; without these flags helm assumes Kubernetes 1.20.
_CAPABILITIES = "-X helm.sh/helm/v3/pkg/{0}.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/{0}.k8sVersionMinor=34"
_KUBERNETES = " ".join(_CAPABILITIES.format(package) for package in ("chartutil", "lint/rules"))


def _folder() -> Path:
    return Path(os.environ.get("PENSTOCK_CACHE") or Path.home() / ".cache" / "penstock") / f"helm-{VERSION}"


def find_helm() -> str | None:
    """The helm on the path, or the one from an earlier build; None when there is neither."""
    built = _folder() / "helm"
    return shutil.which("helm") or (str(built) if built.exists() else None)


def build_helm() -> str | None:
    """Builds helm unless another process has built it; None without Go."""
    go = shutil.which("go")
    if go is None:
        return None
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "helm"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            unfinished = folder / "unfinished"
            subprocess.run(
                [go, "install", f"-ldflags={_KUBERNETES}", f"helm.sh/helm/v3/cmd/helm@{VERSION}"],
                env={**os.environ, "GOBIN": str(unfinished)},
                check=True,
            )
            # Renamed when complete, since `find_helm` uses it without the lock.
            (unfinished / "helm").rename(built)
    return str(built)


if __name__ == "__main__":
    print(find_helm() or build_helm() or "helm cannot be built: go is not installed")
