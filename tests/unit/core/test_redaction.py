"""Redaction: secrets leave no trace in a task's log; other text stays as it is."""

import time

import pytest

from penstock.core.redaction import REDACTED, Redactor

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA0Z3VS5JJ\nq83kLm+/=\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("password=hunter2secret next", "hunter2secret"),
        ("PASSWORD: 'with spaces in it'", "with spaces in it"),
        ('{"api_key": "abc123def456", "x": 1}', "abc123def456"),
        ("connect postgres://user:pa55word@db/x", "pa55word"),
        ("Authorization: Bearer abcdef1234567890", "abcdef1234567890"),
        ("authorization: basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("GET /x?access_token=zzz999&y=1", "zzz999"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVPmB92K27uhbUJU1p1r", "eyJzdWIiOiIxIn0"),
        ("aws AKIAIOSFODNN7EXAMPLE used", "AKIAIOSFODNN7EXAMPLE"),
        ("git ghp_abcdefghijklmnopqrstuvwxyz0123", "ghp_abcdefghijklmnopqrstuvwxyz0123"),
        ("git github_pat_abcdefghijklmnopqrstuvwxyz", "github_pat_abcdefghijklmnopqrstuvwxyz"),
        ("key pk_0123456789abcdef0123", "pk_0123456789abcdef0123"),
        (f"loaded {PEM}", "MIIEowIBAAKCAQEA0Z3VS5JJ"),
        ("secret_value=s3cr3t!", "s3cr3t!"),
        ("client-secret => 'x' token: tok-123456", "tok-123456"),
        ("token_\u0130STANBUL=abcdefgh123", "abcdefgh123"),
    ],
)
def test_what_looks_like_a_secret_is_redacted(text, secret):
    """L: keys, tokens and passwords of the usual forms."""
    found = Redactor().text(text)
    assert secret not in found
    assert REDACTED in found
    # Together with others, as the lines of a chunk are.
    lines = ["before", *text.split("\n"), "after"] * 40
    assert Redactor().texts(lines) == [Redactor().text(line) for line in lines]


@pytest.mark.parametrize(
    "text",
    [
        "frame 1 of 3000",
        "opened /tmp/clip.mp4 in 12 ms",
        "the keyboard has 104 keys",
        "tokens used: about a hundred",
        "https://example.com/a?b=c",
        "skipped 3 basic checks",
        "",
    ],
)
def test_other_text_stays(text):
    assert Redactor({"HOME": "/root", "MONKEY": "banana", "API_KEY": "1"}).text(text) == text


def test_values_of_the_environment_and_of_the_worker_are_redacted():
    """L: values of `*_TOKEN|_SECRET|_PASSWORD|_KEY`, and `worker.redact(value)`."""
    redactor = Redactor({"DB_PASSWORD": "correct horse", "X_TOKEN": "t0ken/1+2", "PATH": "/usr/bin"})
    assert Redactor({"PGPASSWORD": "battery staple"}).text("battery staple") == REDACTED
    redactor.add("registered-value")
    text = "correct horse, t0ken/1+2, t0ken%2F1%2B2, registered-value, /usr/bin"
    assert redactor.text(text) == ", ".join([*[REDACTED] * 4, "/usr/bin"])
    with pytest.raises(ValueError, match="at least 6"):
        redactor.add("abc")


def test_fields_are_redacted_by_name_and_by_value():
    redactor = Redactor({"A_SECRET": "planted-value"})
    found = redactor.fields(
        {
            "password": "x",
            "note": "has planted-value",
            "deep": {"token": [1], "list": ["planted-value", 5]},
            "n": 3,
        }
    )
    assert found == {
        "password": REDACTED,
        "note": f"has {REDACTED}",
        "deep": {"token": REDACTED, "list": [REDACTED, 5]},
        "n": 3,
    }


@pytest.mark.parametrize(
    ("before", "repeated", "after"),
    [
        ("", "password", ""),
        ("", "token=", ""),
        ("", "-----BEGIN ", ""),
        ("", "aaaaaaaa", "://"),
        ("", "eyJ", ""),
        ("", "eyJ-", ""),
        ("", "eyJabcdefgh.", ""),
        ("", "sk_live_", ""),
        ("", "bearer ", ""),
        ("secret", "--------", ""),
        ("https://", "xxxxxxxx", ""),
    ],
)
def test_hostile_text_takes_linear_time(before, repeated, after):
    """A handler may log anything: four times the text takes about four times the time."""
    small, large = (before + repeated * (count // len(repeated)) + after for count in (50_000, 200_000))
    redactor = Redactor()

    def cpu_s(of):
        best = float("inf")
        for _ in range(3):
            began = time.thread_time()
            redactor.text(of)
            best = min(best, time.thread_time() - began)
        return best

    # In quadratic time it would take sixteen times as long.
    assert cpu_s(large) < 10 * cpu_s(small) + 0.02
