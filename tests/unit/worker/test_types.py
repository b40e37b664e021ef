"""Task types in the code of a worker."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.errors import SettingsError
from penstock.worker import Done, Next, Spawn, Type, Wait, Worker
from penstock.worker.execution import Execution, Stage
from penstock.worker.type_registration import TypeRegistration
from penstock.worker.types import types_of

SCHEMA = json.loads(
    (Path(__file__).parents[3] / "schemas" / "messages" / "task-type.schema.json").read_text()
)


def test_a_type_has_each_setting_of_the_schema():
    """W1: `Type` has all that the gateway knows; a pause is an operator's and not the code's."""
    names = {field.name for field in dataclasses.fields(Type)}
    assert names - {"lease_s", "retry_base_s", "retry_max_s"} == SCHEMA["properties"].keys() - {"paused"}


def test_only_given_settings_are_sent_and_compared():
    """W1: a limit that an operator has set is no difference when the code does not decide it."""
    wanted = Type("order", first_stage="reserve", lease_s=1.5, fair=False)
    assert wanted.settings() == {"first_stage": "reserve", "lease_ms": 1500, "fair": False}
    registered = {"first_stage": "reserve", "lease_ms": 1500, "fair": False, "max_in_flight": 5}
    assert wanted.differences(registered) == {}
    assert wanted.differences({**registered, "lease_ms": 1000}) == {"lease_ms": 1500}
    assert Type("order").differences(registered) == {}


def test_callbacks_are_compared_without_their_secrets():
    """W1: a gateway masks headers, and gives a target with defaults as its URL."""
    wanted = Type(
        "t", callbacks=[{"url": "https://a.example"}, {"url": "https://b.example", "headers": {"K": "hush"}}]
    )
    masked = ["https://a.example", {"url": "https://b.example", "headers": {"K": "***"}}]
    assert wanted.differences({"callbacks": masked}) == {}
    assert wanted.differences({"callbacks": ["https://a.example"]}).keys() == {"callbacks"}
    assert "hush" not in repr(wanted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Type("a b"), "Type('a b'): a name has letters"),
        (lambda: Type(""), "a name has letters"),
        (lambda: Type("t", lease_s=1, lease_ms=1000), "give lease_s or lease_ms, not both"),
        (lambda: Type("t", lease_s="1m"), "lease_s='1m' is no number of seconds"),
        (lambda: Type("t", lease_s=float("nan")), "lease_s=nan is no number"),
        (lambda: Type("t", callbacks="https://a.example"), "callbacks is a list of targets"),
        (lambda: Type("t", callbacks=["ftp://a.example"]), "Type('t'): "),
        (lambda: Type("t", callbacks=[1]), "Type('t'): "),
        (lambda: Worker(types=Type("t")), "is no list of Type objects"),
        (lambda: Worker(types="t"), "types='t' is no list"),
        (lambda: Worker(types=["t"]), "types: 't' is no Type"),
        (lambda: Worker(types=[Type("t"), Type("t")]), "types: t is given twice"),
        (lambda: Worker(types_differ="ignore"), "types_differ='ignore' must be one of: change, refuse"),
    ],
)
def test_what_is_no_type_is_refused_where_it_is_written(make, message):
    """O8: the error names what was given."""
    with pytest.raises(SettingsError) as refused:
        make()
    assert message in str(refused.value)


def test_an_unknown_setting_raises():
    """W1: a misspelt setting would otherwise have no effect."""
    with pytest.raises(TypeError, match="lease_seconds"):
        Type("t", lease_seconds=1)


@given(st.lists(st.sampled_from("abc"), unique=True))
def test_types_keep_their_order(names):
    """W1: types are registered in the order of the code."""
    assert [each.name for each in types_of(Type(name) for name in names)] == names


@pytest.mark.parametrize("url", ["", "localhost:8420", "ftp://gateway.example"])
def test_types_need_a_gateway(url):
    """O8: the error names the variable; a worker without types needs none."""
    settings = Worker(kafka="broker.example:9092", gateway=url).settings
    with pytest.raises(SettingsError, match="PENSTOCK_GATEWAY"):
        TypeRegistration(settings, [Type("t")], "change", [])
    TypeRegistration(settings, [], "change", [])


@pytest.mark.parametrize("outcome", [Next("nowhere"), Spawn([], "nowhere"), Wait("e", "nowhere")])
async def test_a_next_stage_without_handler_is_noticed_at_once(outcome, caplog):
    """W1: the log warns once of a stage that a handler names, with type and stage. The result
    stands, because another worker may have the stage."""

    async def handler(_task):
        return outcome

    async def last(_task):
        return Done()

    stages = {("t", "s"): Stage(handler, 5, None), ("t", "end"): Stage(last, 5, None)}
    execution = Execution(stages, None, 1)
    for number in range(3):
        ready = ReadyTask(Fence(number, 0, "s", 0), "t", Context.encode(None), 1000)
        result = await execution.run(ready, pytest.fail)
        assert result.outcome in (Outcome.NEXT, Outcome.SPAWN, Outcome.WAIT)
        assert result.next_stage == "nowhere"
    [record] = caplog.records
    assert (record.event, record.task_type, record.stage) == ("next_stage_unhandled", "t", "s")
    assert (record.next_stage, record.has) == ("nowhere", "end, s")


async def test_a_next_stage_with_a_handler_is_no_warning(caplog):
    """W1: handlers of other types do not count."""

    async def handler(_task):
        return Next("s")

    execution = Execution({("t", "s"): Stage(handler, 5, None)}, None, 1)
    ready = ReadyTask(Fence(1, 0, "s", 0), "t", Context.encode(None), 1000)
    await execution.run(ready, pytest.fail)
    assert not caplog.records
