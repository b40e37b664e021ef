"""Every setting and metric that docs/callbacks.md names exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from penstock import metrics
from penstock.callbacks.settings import CallbacksSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "callbacks.md").read_text()


def test_settings_and_metrics_on_the_page_exist() -> None:
    """O14: what the page names can be set and read."""
    known = {field.name.upper() for field in dataclasses.fields(CallbacksSettings)}
    named = set(re.findall(r"PENSTOCK_([A-Z_]+[A-Z])(?![A-Z_])", PAGE))
    table = PAGE.rpartition("| about |")[2]
    named |= {f"CALLBACK_{name}" for name in re.findall(r"`([A-Z_]+)`", table.partition("\n")[2])}
    assert len(named) > 15
    assert named <= known
    shown = set(re.findall(r"penstock_callback_\w+", PAGE))
    assert shown
    assert shown <= {metric.name for metric in metrics.ALL}
