"""The page that Prometheus scrapes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from penstock import metrics
from penstock.metrics import Metric, Sample
from penstock.metrics.page import Page
from penstock.metrics.rounds import Rounds

COUNTER = Metric("penstock_x_total", "Things.", ("kind",))
HISTOGRAM = Metric("penstock_x_seconds", "Seconds.", (), (0.1, 1.0))


def test_samples_are_exported_by_the_type_of_their_metric() -> None:
    """O4: a counter has a value for each of its labels, and a histogram its count and sum."""
    samples = [
        Sample(COUNTER, 3, ("a",)),
        Sample(COUNTER, 5, ("b",)),
        Sample(HISTOGRAM, 2.5, (), (1, 2, 0)),
    ]
    text, _content_type = Page("stages", lambda: samples).render("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    counter, histogram = families["penstock_x"], families["penstock_x_seconds"]
    assert (counter.documentation, counter.type) == ("Things.", "counter")
    found = {(sample.name, sample.labels["kind"]): sample.value for sample in counter.samples}
    assert found == {("penstock_x_total", "a"): 3, ("penstock_x_total", "b"): 5}
    found = {sample.name: sample.value for sample in histogram.samples}
    assert found["penstock_x_seconds_count"] == 3
    assert found["penstock_x_seconds_sum"] == 2.5


def test_no_name_is_used_twice() -> None:
    """Two metrics of one name would mix two series."""
    names = [metric.name for metric in metrics.ALL]
    assert len(names) == len(set(names))


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
