"""The metrics page without prometheus_client: the same as with it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from penstock import metrics
from penstock.metrics import Metric, Sample
from penstock.metrics.page import Page
from penstock.metrics.text_page import CONTENT_TYPE, TextPage

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


def test_a_scraper_reads_the_same_from_both_pages() -> None:
    """O4: names, types, help texts, labels and values, with any characters."""
    valid = [sample for sample in SAMPLES if "\udcff" not in "".join(sample.labels)]
    ours, content_type = TextPage("worker", lambda: valid).render("application/openmetrics-text")
    theirs, _content_type = Page("worker", lambda: valid).render("text/plain")
    assert content_type == CONTENT_TYPE
    found, expected = families(ours), families(theirs)
    for name in ("penstock_worker_slots", "penstock_worker_attempts", "penstock_text", "penstock_build_info"):
        assert found[name] == expected[name]
    for name in ("process_cpu_seconds", "process_start_time_seconds", "process_resident_memory_bytes"):
        assert found[name][0] == expected[name][0]
        [(_name, _labels, value)], [(_same, _labels, other)] = found[name][2], expected[name][2]
        assert 0.2 < value / other < 5, name


def test_a_label_that_utf_8_lacks_does_not_break_the_page() -> None:
    """Stages have any names."""
    text, _content_type = TextPage("worker", lambda: SAMPLES).render("")
    assert b'stage="\xc3\xbc \\udcff"' in text


def test_the_page_has_checks_and_counts_of_the_log() -> None:
    """O4: as the page of a service has them."""
    page = TextPage("worker", lambda: ())
    page.checks = {"kafka": False}
    page.logged.warnings = 2
    found = families(page.render("")[0])
    assert found["penstock_check_ok"][2] == [("penstock_check_ok", {"check": "kafka"}, 0.0)]
    assert found["penstock_logged"][2][0] == ("penstock_logged_total", {"level": "warning"}, 2.0)
