"""Submissions: the checks of callback URLs beyond the schema, and errors about choices."""

from __future__ import annotations

import pytest

from penstock.contracts.submission import Submission
from penstock.errors import InvalidRecord


@pytest.mark.parametrize(
    "url",
    [
        "http://a b/",
        "http://a/b c",
        " http://a/",
        "http://a/\n",
        "http://a\t.b/",
        "http://a\x7f/",
        "http://a\u00a0b/",
        "http://a%20b/",
        "http://a..b/",
        "http://-a/",
        "http://a\\b/",
        "http://" + "a" * 64 + "/",
        "http://" + "a." * 130 + "b/",
        "http://[1::2::3]/",
        "http://[fe80::1/",
        "http://:80/",
        "http://@host/",
        "http://u:p@host/",
        "http://host:70000/",
        "http://host:0/",
        "ftp://host/",
        "//host/",
    ],
)
def test_a_callback_that_cannot_be_called_is_refused(url: str) -> None:
    """C1: the submission is refused with a pointer, instead of retrying calls until the schedule
    ends."""
    with pytest.raises(InvalidRecord) as refused:
        Submission.from_wire({"type": "t", "callbacks": ["https://shop.example/", url]})
    assert refused.value.pointer == "/callbacks/1"


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "http://127.0.0.1:8000/hook",
        "http://[::1]:8000/hook",
        "https://shop.example./a%20b?c=d&e=ü#f",
        "https://my_service.internal/",
        "https://bücher.example/",
        "HTTPS://SHOP.EXAMPLE/",
    ],
)
def test_a_callback_that_can_be_called_is_accepted(url: str) -> None:
    """C1: names, addresses, ports, other scripts, and underscores, which private networks use."""
    assert Submission.from_wire({"type": "t", "callbacks": [url]}).callbacks == (url,)


def test_the_error_names_all_choices() -> None:
    """T5: the error about a mistyped priority names all priorities, not two and a count."""
    with pytest.raises(InvalidRecord) as refused:
        Submission.from_wire({"type": "t", "priority": "URGENT"})
    assert refused.value.pointer == "/priority"
    assert refused.value.reason == '"URGENT" is not one of "HIGHEST", "HIGH", "MEDIUM", "LOW", "LOWEST"'
