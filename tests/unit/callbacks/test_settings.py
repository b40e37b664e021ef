"""Invalid settings of the callbacks service."""

import base64

import pytest

from penstock.callbacks.settings import CallbacksSettings
from penstock.errors import SettingsError

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()


def test_unsigned_callbacks_are_not_sent():
    """C7: without a secret the service does not start, and its message has a command that makes
    a valid one."""
    with pytest.raises(SettingsError) as refused:
        CallbacksSettings.load({})
    message = str(refused.value)
    assert "PENSTOCK_CALLBACK_SECRETS" in message
    command = message[message.index('"import') + 1 : message.rindex('"')]
    printed = []
    exec(command, {"print": printed.append})  # the command of the message
    assert CallbacksSettings.load({"PENSTOCK_CALLBACK_SECRETS": printed[0]}).callback_secrets == (printed[0],)


@pytest.mark.parametrize(
    "secret",
    ["hunter2hunter2hunter2hunter2", "whsec_%%%hunter2", "whsec_" + base64.b64encode(b"hunter2").decode()],
)
def test_a_bad_secret_is_refused_and_not_shown(secret):
    """C7: the message names the number of the secret and the reason, but not the secret."""
    with pytest.raises(SettingsError, match="PENSTOCK_CALLBACK_SECRETS: number 2") as refused:
        CallbacksSettings.load({"PENSTOCK_CALLBACK_SECRETS": f"{SECRET},{secret}"})
    assert "hunter2" not in str(refused.value)
    assert base64.b64encode(b"hunter2").decode() not in str(refused.value)


def test_settings_never_show_their_secrets():
    """C7: the repr of settings contains no secret."""
    settings = CallbacksSettings.load({}, callback_secrets=(SECRET,))
    assert SECRET not in repr(settings)
    assert SECRET.removeprefix("whsec_") not in str(settings)


@pytest.mark.parametrize(
    ("given_settings", "named"),
    [
        ({"stall_timeout_s": 19.0}, ("stall_timeout_s",)),
        ({"callback_target_slots": 501}, ("callback_target_slots", "callback_slots")),
        ({"callback_schedule_s": ("5", "soon")}, ("callback_schedule_s",)),
        ({"callback_schedule_s": ("-5",)}, ("callback_schedule_s",)),
        ({"callback_schedule_s": ("nan",)}, ("callback_schedule_s",)),
        ({"callback_timeout_s": 0.0}, ("callback_timeout_s",)),
        ({"callback_slow_s": 0.0}, ("callback_slow_s",)),
        ({"callback_abnormal_count": 0}, ("callback_abnormal_count",)),
        ({"callback_calm_s": -1.0}, ("callback_calm_s",)),
        ({"callback_guards_off": ("erly",)}, ("callback_guards_off",)),
        ({"callback_suspicion_share": -0.1}, ("callback_suspicion_share",)),
        ({"callback_drain_rate": 0.0}, ("callback_drain_rate",)),
        ({"callback_held_max_s": float("nan")}, ("callback_held_max_s",)),
        ({"callback_allow": ("10.0.0.0/8", "localhost")}, ("callback_allow",)),
        ({"callback_allow": ("10.0.0.1/8",)}, ("callback_allow",)),
    ],
)
def test_settings_that_contradict_each_other_are_named(given_settings, named):
    """C6: a contradiction is refused at start-up with the names of both settings."""
    with pytest.raises(SettingsError) as refused:
        CallbacksSettings.load({}, callback_secrets=(SECRET,), **given_settings)
    for name in named:
        assert f"PENSTOCK_{name.upper()}=" in str(refused.value)


def test_a_guard_can_be_turned_off():
    """C4a: each guard of the breaker can be turned off, and all are on by default."""
    on = CallbacksSettings()
    off = CallbacksSettings(callback_guards_off=("early", "share", "decay"), callback_suspicion_share=0.0)
    assert on.counts_early
    assert not off.counts_early
    assert all((on.health.share, on.health.decay_s, on.health.self_check_share))
    assert not any((off.health.share, off.health.decay_s, off.health.self_check_share))


def test_intervals_follow_the_longest_call():
    """C6: an attempt that may still be running is neither repeated nor published again."""
    settings = CallbacksSettings(callback_timeout_s=40.0)
    assert 2 * 40 <= settings.horizon_s < settings.republish_s
