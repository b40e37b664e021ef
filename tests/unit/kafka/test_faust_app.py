"""The additions of the Faust application to Faust."""

import logging

from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread
from mode import Service

from penstock.kafka.processing.faust_consumer import LoopConsumer
from penstock.logs import quiet_libraries


def _descendants(kind):
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


def test_subclasses_of_faust_services_are_quiet(monkeypatch):
    """Otherwise they would log every start and stop under our logger names."""
    monkeypatch.delenv("PENSTOCK_LIBRARY_LOG_LEVEL", raising=False)
    own_types = {kind for kind in _descendants(Service) if kind.__module__.startswith("penstock.")}
    assert LoopConsumer in own_types
    assert any(issubclass(kind, AIOKafkaConsumerThread) for kind in own_types)
    level = logging.getLogger("faust").level
    try:
        quiet_libraries()
        assert [kind for kind in own_types if kind.logger.isEnabledFor(logging.ERROR)] == []
    finally:
        logging.getLogger("faust").setLevel(level)
