"""docs/callbacks.md says what the code does: its settings, metrics and figures are those there are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from penstock import metrics
from penstock.callbacks.settings import CallbacksSettings
from penstock.core.delivery import DeliveryPolicy
from penstock.core.health import HealthPolicy, HealthWindow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "callbacks.md").read_text()
DEFAULTS = CallbacksSettings()


def test_settings_and_metrics_on_the_page_exist() -> None:
    """Habit 8: what the page names can be set and read."""
    known = {field.name.upper() for field in dataclasses.fields(CallbacksSettings)}
    named = set(re.findall(r"PENSTOCK_([A-Z_]+[A-Z])(?![A-Z_])", PAGE))
    table = PAGE.rpartition("| about |")[2]
    named |= {f"CALLBACK_{name}" for name in re.findall(r"`([A-Z_]+)`", table.partition("\n")[2])}
    assert len(named) > 25
    assert named <= known
    shown = set(re.findall(r"penstock_callback_\w+", PAGE))
    assert shown
    assert shown <= {metric.name for metric in metrics.ALL}


def test_figures_on_the_page_are_the_defaults() -> None:
    """C3, C5: sizes and times on the page are those of a service that nobody has configured."""
    s = DEFAULTS
    for claim in (
        f"normal path<br/>{s.callback_slots} slots, {s.callback_target_slots} a target",
        f"slow pool<br/>{s.callback_slow_slots}, {s.callback_slow_target_slots} a target",
        f"diverted path<br/>{s.callback_diverted_slots} slots, {s.callback_diverted_target_slots} a target",
        f"longer than {s.callback_slow_s:g} s adds one",
        f"calm time T ({s.callback_calm_s:g} s)",
        f"At {s.callback_abnormal_count} the flag rises",
        f"Beyond {s.callback_abnormal_ceiling} the count",
        f"at least {s.callback_abnormal_share:.0%}".replace("%", " %"),
        f"loses one every {s.callback_decay_s:g} s",
        f"callback after {s.callback_probe_s:g} s, then {2 * s.callback_probe_s:g} s, up to every {s.callback_probe_most_s:g} s",
        f"**drained** at {s.callback_drain_rate:g} a second",
        f"turn longer than {s.callback_patience_s:g} s",
    ):
        assert claim in PAGE, claim
    assert DeliveryPolicy().schedule_s == (5, 300, 1800, 7200, 18_000, 36_000, 36_000)
    assert "after 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 10 h" in PAGE
    assert DeliveryPolicy().attempts == 8


def test_the_window_is_as_drawn() -> None:
    """C2 to C4: the flag rises with the tenth slow call, the count stops at 20, nothing comes off within T of the last
    slow call, and from 20 the tenth quick one brings the flag down."""
    policy = HealthPolicy()
    window = HealthWindow(policy)
    flags = []
    for second in range(30):
        window.record(slow=True, now_s=second)
        flags.append(window.verdict(second))
    assert flags.index(True) + 1 == 10
    assert window.vitals(29).count == 20
    window.record(slow=False, now_s=29 + policy.calm_s)
    assert window.vitals(29 + policy.calm_s).count == 20
    quick = 0
    while window.verdict(now_s := 30 + policy.calm_s):
        window.record(slow=False, now_s=now_s)
        quick += 1
    assert (quick, window.vitals(now_s).count) == (10, 10)


def test_the_page_is_found() -> None:
    """Readers come from the README, the architecture and the how-to guides; what the page links to is there."""
    assert "docs/callbacks.md" in (ROOT / "README.md").read_text()
    assert "docs/callbacks.md" in (ROOT / "ARCHITECTURE.md").read_text()
    assert "callbacks.md" in (ROOT / "docs" / "how-to.md").read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE)]
    assert len(links) > 3
    assert all((ROOT / "docs" / link).exists() for link in links if link)
