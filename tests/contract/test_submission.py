"""What a submission may say that its schema cannot check alone: callback URLs, and how choices are told."""

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
def test_a_callback_that_could_never_be_called_is_refused(url: str) -> None:
    """C1: at submission, with a pointer, rather than tried in vain until the schedule is exhausted."""
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
def test_a_callback_that_can_be_called_is_taken(url: str) -> None:
    """C1: names, addresses, ports, other scripts, and underscores as private networks have them."""
    assert Submission.from_wire({"type": "t", "callbacks": [url]}).callbacks == (url,)


def test_all_choices_are_told() -> None:
    """T5: whoever mistyped a priority reads all there are, not two of them and a number."""
    with pytest.raises(InvalidRecord) as refused:
        Submission.from_wire({"type": "t", "priority": "URGENT"})
    assert refused.value.pointer == "/priority"
    assert refused.value.reason == '"URGENT" is not one of "HIGHEST", "HIGH", "MEDIUM", "LOW", "LOWEST"'
