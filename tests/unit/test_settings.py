"""Settings: read from the environment, refused when they make no sense."""

import pytest

from penstock.errors import SettingsError
from penstock.settings import Kafka, Platform
from penstock.task_sync.settings import TaskSyncSettings


def test_the_environment_is_read_and_a_keyword_wins():
    """A keyword beats the environment, the environment beats the default."""
    environ = {"PENSTOCK_KAFKA": "a:1", "PENSTOCK_PREFIX": "x.", "PENSTOCK_SESSION_TIMEOUT_S": "12"}
    settings = Platform.load(environ, prefix="y.")
    assert (settings.kafka, settings.prefix, settings.session_timeout_s) == ("a:1", "y.", 12.0)


def test_a_value_that_does_not_parse_names_its_variable():
    """The message says which variable, which value and what was expected."""
    with pytest.raises(SettingsError, match=r"PENSTOCK_WINDOW='many' is not of type int"):
        TaskSyncSettings.load({"PENSTOCK_WINDOW": "many"})


def test_contradicting_settings_are_refused_and_both_are_named():
    """Settings refuse nonsense at start-up, naming both fields."""
    with pytest.raises(SettingsError, match="release_batch=500 must be from 1 to window=100"):
        TaskSyncSettings.load({}, release_batch=500, window=100)


def test_a_session_the_broker_would_refuse_is_refused_here():
    """The broker's bounds are 6 s to 30 min."""
    with pytest.raises(SettingsError, match="session_timeout_s=1"):
        Kafka.load({}, session_timeout_s=1.0)


@pytest.mark.parametrize("servers", ["nope:x", "a:1,,b:2", "http://a:9092", "a b:1", "::1:9092"])
def test_what_is_no_server_is_refused(servers):
    """The client library would fail with an error of its own much later."""
    with pytest.raises(SettingsError, match="is not host:port"):
        Kafka.load({}, kafka=servers)


@pytest.mark.parametrize("servers", ["a", "a:1, b-c.d:2", "127.0.0.1:9092", "[::1]:9092"])
def test_what_is_a_server_is_taken(servers):
    """Names, addresses, several; without a port it is Kafka's own."""
    assert Kafka.load({}, kafka=servers).kafka == servers
