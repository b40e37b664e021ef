"""Logs have only the origin of a URL: scheme, host and port."""

import pytest

from penstock.contracts.event import origin_of

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://shop.example/hooks/s3cr3t?token=s3cr3t#s3cr3t", "https://shop.example"),
        ("http://user:s3cr3t@shop.example:8080/", "http://shop.example:8080"),
        ("http://[::1]:9/s3cr3t", "http://[::1]:9"),
        ("HTTPS://Shop.example?s3cr3t", "https://shop.example"),
        # Older rows may have targets that are no valid URLs.
        ("http://[s3cr3t", "(no URL)"),
        ("http://host:s3cr3t/", "(no URL)"),
        ("s3cr3t", "(no URL)"),
        ("http:///s3cr3t", "(no URL)"),
        ("", "(no URL)"),
    ],
)
def test_the_origin_is_scheme_host_and_port(url, shown):
    """C7: path, query and user of a URL may be secrets."""
    assert origin_of(url) == shown
