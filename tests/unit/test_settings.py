"""Settings come from the environment; invalid ones are refused."""

import dataclasses
import re
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from penstock import variables
from penstock.callbacks.settings import CallbacksSettings
from penstock.cli.main import cli
from penstock.errors import SettingsError
from penstock.gateway.settings import GatewaySettings
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.settings import ENVIRONMENT_PREFIX, Kafka, Platform
from penstock.stages.settings import StagesSettings
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker import Worker
from penstock.worker.settings import WorkerSettings

ALL = (
    CallbacksSettings,
    GatewaySettings,
    HeartbeatsSettings,
    StagesSettings,
    TaskSyncSettings,
    WorkerSettings,
)
FLOATS = sorted(
    {
        (kind, field.name)
        for kind in ALL
        for field in dataclasses.fields(kind)
        if isinstance(field.default, float)
    },
    key=str,
)


def test_the_environment_is_read_and_a_keyword_wins():
    """A keyword beats the environment, the environment beats the default."""
    environ = {"PENSTOCK_KAFKA": "a:1", "PENSTOCK_PREFIX": "x.", "PENSTOCK_SESSION_TIMEOUT_S": "12"}
    settings = Platform.load(environ, prefix="y.")
    assert (settings.kafka, settings.prefix, settings.session_timeout_s) == ("a:1", "y.", 12.0)


def test_an_unknown_keyword_is_refused():
    """O8: a misspelt keyword of a worker is an error where it stands, with the nearest setting."""
    with pytest.raises(TypeError, match="WorkerSettings has no setting 'threds': did you mean 'threads'"):
        Worker(threds=3)
    with pytest.raises(TypeError, match=r"no setting 'colour'$"):
        Kafka.load(colour="red")


def test_a_value_that_does_not_parse_names_its_variable():
    """The message says which variable, which value and what was expected."""
    with pytest.raises(SettingsError, match=r"PENSTOCK_WINDOW='many' is not of type int"):
        TaskSyncSettings.load({"PENSTOCK_WINDOW": "many"})


def test_contradicting_settings_are_refused_and_both_are_named():
    """Contradicting settings are refused at start-up with the names of both."""
    with pytest.raises(
        SettingsError, match="PENSTOCK_RELEASE_BATCH=500 must be from 1 to PENSTOCK_WINDOW=100"
    ):
        TaskSyncSettings.load({}, release_batch=500, window=100)


def test_attempts_in_flight_of_a_worker_are_limited():
    """H2: handlers and backlog together have a limit; a higher load needs more workers."""
    assert WorkerSettings.load({}, objects="memory:///", pool=99_000, backlog=1_000).pool == 99_000
    with pytest.raises(
        SettingsError, match="PENSTOCK_POOL=99001 and PENSTOCK_BACKLOG=1000 must be at most 100,000"
    ):
        WorkerSettings.load({}, objects="memory:///", pool=99_001, backlog=1_000)


def test_a_session_the_broker_would_refuse_is_refused_here():
    """The broker's bounds are 6 s to 30 min."""
    with pytest.raises(SettingsError, match="PENSTOCK_SESSION_TIMEOUT_S=1"):
        Kafka.load({}, session_timeout_s=1.0)


@pytest.mark.parametrize("servers", ["nope:x", "a:1,,b:2", "http://a:9092", "a b:1", "::1:9092"])
def test_an_invalid_server_is_refused(servers):
    """The client library would fail later, with a worse error."""
    with pytest.raises(SettingsError, match="is not host:port"):
        Kafka.load({}, kafka=servers)


@pytest.mark.parametrize("servers", ["a", "a:1, b-c.d:2", "127.0.0.1:9092", "[::1]:9092"])
def test_valid_servers_are_accepted(servers):
    """Names, addresses and lists are valid; without a port Kafka's default applies."""
    assert Kafka.load({}, kafka=servers).kafka == servers


@pytest.mark.parametrize(("kind", "name"), FLOATS, ids=lambda value: getattr(value, "__name__", value))
def test_no_setting_accepts_infinity_or_nan(kind, name):
    """Infinity and NaN are refused with the name of the setting, also as keywords.

    A lease that is checked every `inf` seconds would never expire, and NaN passes every comparison.
    """
    variable = ENVIRONMENT_PREFIX + name.upper()
    for text in ("nan", "inf", "-inf", "1e300"):
        said = re.escape(f"{variable}={float(text)} must be a number, and at most 1e+09")
        with pytest.raises(SettingsError, match=said):
            kind.load({variable: text})
        with pytest.raises(SettingsError, match=said):
            kind.load({}, **{name: float(text)})


def test_the_tick_of_expiry_is_much_shorter_than_a_lease():
    """An expiry is late by up to one tick."""
    assert HeartbeatsSettings.load({}, tick_s=30.0).tick_s == 30.0
    for tick_s in (0.0, 30.1):
        with pytest.raises(SettingsError, match=f"PENSTOCK_TICK_S={tick_s} must be above 0 and at most 30"):
            HeartbeatsSettings.load({}, tick_s=tick_s)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("pool", 0),
        ("pool", 10**12),
        ("backlog", -1),
        ("backlog", 10**12),
        ("threads", 0),
        ("threads", 10**9),
    ],
)
def test_impossible_pool_sizes_are_refused(name, bad):
    """They are refused at the start, not when a thread cannot be created."""
    with pytest.raises(SettingsError, match=f"PENSTOCK_{name.upper()}={bad} must be from"):
        WorkerSettings.load({}, **{name: bad})


WRONG_VALUES = {
    "int": "-1",
    "float": "-1",
    "str": "no such: value",
    "bool": "perhaps",
    "tuple[str, ...]": "no such value",
}


@pytest.mark.parametrize("kind", ALL)
def test_each_refusal_names_variables_only(kind):
    """O8: the operator sets variables, so an error has no name of a field that is none."""
    names = [field.name for field in dataclasses.fields(kind)]
    valid = {"PENSTOCK_CALLBACK_SECRETS": "whsec_" + "A" * 43 + "="}
    errors = {}
    for field in dataclasses.fields(kind):
        variable = ENVIRONMENT_PREFIX + field.name.upper()
        with suppress_settings_error() as caught:
            kind.load({**valid, variable: WRONG_VALUES[str(field.type)]})
        if caught:
            errors[variable] = caught[0]
    assert len(errors) > len(names) / 3
    for variable, error in errors.items():
        assert variable in error
        words = set(re.findall(r"(?<![\w=])[a-z_]+(?==)|\b[a-z]+_[a-z_]+\b", error))
        assert not words & set(names), error


@contextmanager
def suppress_settings_error():
    """Yields a list that gets the error of the block, if there is one."""
    caught = []
    try:
        yield caught
    except SettingsError as error:
        caught.append(str(error))


def test_a_value_is_not_taken_for_the_name_of_a_setting(tmp_path):
    """O8: the path of a file may have the name of a setting."""
    file = tmp_path / "topics_file"
    with pytest.raises(SettingsError, match=re.escape(f"PENSTOCK_TOPICS_FILE={file}: this file")):
        Kafka.load({"PENSTOCK_TOPICS_FILE": str(file)})


def test_the_list_of_variables_has_every_setting():
    """O8: a name that is missing in the list would look misspelt, if it resembles another."""
    assert {field.name.upper() for kind in ALL for field in dataclasses.fields(kind)} == variables.SETTINGS


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("PENSTOCK_KAKFA", "PENSTOCK_KAFKA"),
        ("PENSTOCK_POSTGRESS", "PENSTOCK_POSTGRES"),
        ("PENSTOCK_LOGLEVEL", "PENSTOCK_LOG_LEVEL"),
        ("PENSTOCK_WORKER_GATEWAYS", "PENSTOCK_WORKER_GATEWAY"),
        ("PENSTOCK_KAFKA", None),
        ("PENSTOCK_TEST_KAFKA", None),
        ("PENSTOCK_MINE", None),
        # Kubernetes sets these for a service named penstock-gateway.
        ("PENSTOCK_GATEWAY_SERVICE_HOST", None),
        ("PENSTOCK_GATEWAY_PORT_8420_TCP_ADDR", None),
        ("KAFAK", None),
    ],
)
def test_a_misspelt_variable_is_found_with_the_nearest_one(variable, nearest):
    """O8: a misspelt setting would be ignored, and the default would apply."""
    assert variables.misspelt({variable: "x"}) == ({variable: nearest} if nearest else {})


def test_a_verb_warns_of_a_misspelt_variable(monkeypatch):
    """O8: the warning is on standard error, since programs read standard output."""
    monkeypatch.setenv("PENSTOCK_POSTGRESS", "postgresql://x")
    outcome = CliRunner().invoke(cli, ["types", "--help"])
    assert "PENSTOCK_POSTGRESS is not read: did you mean PENSTOCK_POSTGRES?" in outcome.stderr


def test_a_worker_does_not_take_the_port_of_a_service():
    """O4: services and a worker with the same environment do not listen on one port."""
    both = {"PENSTOCK_METRICS_PORT": "9108"}
    assert GatewaySettings.load(both).metrics_port == 9108
    assert WorkerSettings.load(both, objects="memory:///").metrics_port == 0
    own = both | {"PENSTOCK_WORKER_METRICS_PORT": "9109"}
    assert WorkerSettings.load(own, objects="memory:///").metrics_port == 9109
