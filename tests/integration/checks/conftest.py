"""Fixtures of the tests of `penstock check`."""

import pytest

from penstock.checks import in_transit


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    """A check gives what is in transit a second, instead of ten, to arrive."""
    monkeypatch.setattr(in_transit, "SETTLE_S", 1.0)
    monkeypatch.setattr(in_transit, "SEARCH_EVERY_S", 0.2)
