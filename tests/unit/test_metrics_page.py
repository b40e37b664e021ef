"""The page that Prometheus scrapes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from penstock import metrics
from penstock.metrics import Metric, Sample
from penstock.metrics.page import Page
from penstock.metrics.rounds import Rounds

RENAMED = Metric("penstock_x_new_total", "Things.", ("kind",), deprecated=("penstock_x_old_total",))
HISTOGRAM = Metric("penstock_x_new_seconds", "Seconds.", (), (0.1, 1.0), ("penstock_x_old_seconds",))


def test_a_renamed_metric_keeps_its_old_name_for_one_release() -> None:
    """O4: a dashboard on the old name goes on working, and its help text names the new
    one."""
    samples = [
        Sample(RENAMED, 3, ("a",)),
        Sample(RENAMED, 5, ("b",)),
        Sample(HISTOGRAM, 2.5, (), (1, 2, 0)),
    ]
    text, _content_type = Page("stages", lambda: samples).render("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    old, new = families["penstock_x_old"], families["penstock_x_new"]
    assert old.documentation == "Deprecated: use penstock_x_new_total."
    assert new.documentation == "Things."
    assert old.type == new.type == "counter"
    for name in ("penstock_x_old", "penstock_x_new"):
        found = {(sample.name, sample.labels["kind"]): sample.value for sample in families[name].samples}
        assert found == {(f"{name}_total", "a"): 3, (f"{name}_total", "b"): 5}
    found = {sample.name: sample.value for sample in families["penstock_x_old_seconds"].samples}
    assert found["penstock_x_old_seconds_count"] == 3
    assert found["penstock_x_old_seconds_sum"] == 2.5
    assert families["penstock_x_old_seconds"].documentation == "Deprecated: use penstock_x_new_seconds."


def test_no_name_is_used_twice() -> None:
    """An old name that a new metric takes over would mix two series."""
    names = [name for metric in metrics.ALL for name, _doc in metric.exported]
    assert len(names) == len(set(names))


def test_an_old_name_keeps_its_type() -> None:
    """The ending of a name decides its type."""
    for metric in metrics.ALL:
        for name in metric.deprecated:
            assert name.endswith("_total") == metric.name.endswith("_total"), name


def test_a_loop_is_exported_from_its_start_on() -> None:
    """O4: an alert on the age of the last round also fires for a loop that never completed one. A
    service that begins again keeps its values."""
    now_s = 100.0
    rounds = Rounds(lambda: now_s)
    rounds.expect("a", 15.0)
    rounds.expect("b", 30.0)

    def found() -> dict[tuple[str, str], float]:
        return {(sample.metric.name, *sample.labels): sample.value for sample in rounds.samples()}

    name, interval = metrics.LAST_ROUND.name, metrics.ROUND_INTERVAL.name
    assert found() == {(name, "a"): 100.0, (interval, "a"): 15.0, (name, "b"): 100.0, (interval, "b"): 30.0}
    now_s = 110.0
    rounds.complete("a")
    rounds.expect("a", 15.0)
    rounds.expect("b", 30.0)
    assert (found()[name, "a"], found()[name, "b"]) == (110.0, 100.0)
