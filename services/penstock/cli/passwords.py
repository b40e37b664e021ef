"""Passwords of services, which a deployment has generated: from the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable

import click

from penstock.core.scram import password_fault


def variable_of(service: str) -> str:
    """The variable with the password of a service, of the tables' owner or of the reader."""
    return "PENSTOCK_PASSWORD_" + service.upper().replace("-", "_")


def given_passwords(services: Iterable[str]) -> dict[str, str]:
    """The passwords by service; services without one are left out.

    Raises:
        click.UsageError: a password cannot be used.
    """
    found = {}
    for service in services:
        if password := os.environ.get(variable_of(service), ""):
            if fault := password_fault(password):
                raise click.UsageError(f"{variable_of(service)} cannot be used: {fault}")
            found[service] = password
    return found
