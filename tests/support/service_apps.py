"""The app and the settings of each service in `penstock.kafka.topology.services`."""

from __future__ import annotations

import importlib
from typing import Any

from penstock import process
from penstock.kafka.topology.services import SERVICES
from penstock.settings import Settings
from tests.support.callback_targets import LOOPBACK, SECRET

# Settings that a service does not start without.
_REQUIRED = {"callbacks": {"callback_secrets": (SECRET,), "callback_allow": LOOPBACK}}


def settings_of(service: str) -> type[Settings]:
    """The settings of a service: the only class of its kind in its module `settings`."""
    module = importlib.import_module(f"penstock.{SERVICES[service].package}.settings")
    (found,) = (
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Settings) and kind.__module__ == module.__name__
    )
    return found


def app_of(service: str, **settings: Any) -> process.Service:
    """The app of a service, with the given settings and those that it needs to start.

    Settings are not validated, because tests shorten times below what operators may choose.
    """
    defaults = {"objects": "memory:///"} if SERVICES[service].objects else {}
    given = {**defaults, **_REQUIRED.get(service, {}), **settings}
    module = importlib.import_module(f"penstock.{SERVICES[service].package}.app")
    app: process.Service = module.create_app(settings_of(service)(**given))
    return app
