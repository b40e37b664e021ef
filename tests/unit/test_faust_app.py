"""What the Faust application adds to Faust."""

import logging

from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread
from mode import Service

from penstock.kafka.faust_app import _consumer_type
from penstock.logs import quiet_libraries


def _descendants(kind):
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


def test_our_services_of_fausts_kind_are_as_quiet_as_its_own(monkeypatch):
    """They would narrate every start and stop under our name, between what we have to say."""
    monkeypatch.delenv("PENSTOCK_LIBRARY_LOG_LEVEL", raising=False)
    made = _consumer_type(0.1)
    ours = {kind for kind in _descendants(Service) if kind.__module__.startswith("penstock.")}
    assert made in ours
    assert any(issubclass(kind, AIOKafkaConsumerThread) for kind in ours)
    level = logging.getLogger("faust").level
    try:
        quiet_libraries()
        assert [kind for kind in ours if kind.logger.isEnabledFor(logging.ERROR)] == []
    finally:
        logging.getLogger("faust").setLevel(level)
