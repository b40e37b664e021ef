"""The metrics page: what a scraper reads is what the process has."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock import metrics
from penstock.metrics import Metric, Sample
from penstock.metrics.text_page import TextPage

SAMPLES = [
    Sample(metrics.WORKER_SLOTS, 7),
    Sample(metrics.WORKER_ATTEMPTS, 3, ("t", 'a "quoted" \\ \n stage', "done")),
    Sample(metrics.WORKER_ATTEMPTS, 10**18, ("t", "ü \udcff", "fail")),
    Sample(Metric("penstock_text", 'A help "text" \\ of\ntwo lines.'), 1.5),
]


def families(text: bytes) -> dict[str, tuple[str, str, list[tuple[str, dict[str, str], float]]]]:
    return {
        family.name: (
            family.type,
            family.documentation,
            [(sample.name, sample.labels, sample.value) for sample in family.samples],
        )
        for family in text_string_to_metric_families(text.decode())
    }


def test_a_scraper_reads_what_the_process_has() -> None:
    """O4: names, types, help texts, labels and values, with any characters."""
    valid = [sample for sample in SAMPLES if "\udcff" not in "".join(sample.labels)]
    found = families(TextPage("worker", lambda: valid).render())
    for sample in valid:
        name, labels = sample.metric.name, dict(zip(sample.metric.labels, sample.labels, strict=True))
        expected = (sample.metric.kind, sample.metric.doc, [(name, labels, sample.value)])
        assert found[name.removesuffix("_total")] == expected


def test_the_page_has_the_metrics_of_its_process() -> None:
    """O4: under the names of prometheus_client, which dashboards use, and with its values."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    found, expected = families(TextPage("worker", lambda: ()).render()), families(generate_latest(registry))
    for name in expected:
        assert found[name][0] == expected[name][0]
        [(_name, _labels, value)], [(_same, _labels, other)] = found[name][2], expected[name][2]
        assert 0.2 < value / other < 5, name


def test_a_label_that_utf_8_lacks_does_not_break_the_page() -> None:
    """Stages have any names."""
    text = TextPage("worker", lambda: SAMPLES).render()
    assert b'stage="\xc3\xbc \\udcff"' in text


def test_the_page_has_checks_and_counts_of_the_log() -> None:
    """O4: as the page of a service has them."""
    page = TextPage("worker", lambda: ())
    page.checks = {"kafka": False}
    page.logged.warnings = 2
    found = families(page.render())
    assert found["penstock_check_ok"][2] == [("penstock_check_ok", {"check": "kafka"}, 0.0)]
    assert found["penstock_logged"][2][0] == ("penstock_logged_total", {"level": "warning"}, 2.0)
