"""Signatures of callbacks."""

import base64
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError
from tests.support.webhooks import verifies, versions

from penstock.callbacks.signing import Ed25519Key, SymmetricKey, signed_headers
from penstock.crypto import generate_private_key

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
OTHER = "whsec_" + base64.b64encode(b"o" * 32).decode()
PAIR, OTHER_PAIR = (Ed25519Key(generate_private_key()) for _ in range(2))
URL = "https://shop.example/hooks?a=1"

bodies = st.text().map(str.encode)
ids = st.text("abc-_019", min_size=1)
# As `contracts.subscription` accepts them: without blanks and control characters.
urls = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=50).map("https://a".__add__)


@given(body=bodies, message_id=ids)
def test_each_active_secret_verifies(body, message_id):
    """C7: during a rotation a target verifies with the old or the new secret, and with no other."""
    keys = [SymmetricKey(OTHER), SymmetricKey(SECRET)]
    headers = signed_headers(keys, message_id, URL, body, datetime.now(UTC))
    for secret in (OTHER, SECRET):
        Webhook(secret).verify(body, headers, json_parse=False)
        assert verifies(headers, body, secret)
        assert verifies(headers, body, secret, audience=URL)
    assert versions(headers) == ["v1", "v1"]
    third = "whsec_" + base64.b64encode(b"t" * 32).decode()
    assert not verifies(headers, body, third)
    with pytest.raises(WebhookVerificationError):
        Webhook(third).verify(body, headers, json_parse=False)


@given(body=bodies, message_id=ids)
def test_ed25519_and_a_symmetric_secret_sign_together(body, message_id):
    """C7: `v1a` verifies with the public key; a library that knows `v1` only ignores its entry."""
    headers = signed_headers([PAIR, SymmetricKey(SECRET)], message_id, URL, body, datetime.now(UTC))
    assert versions(headers) == ["v1a", "v1"]
    assert verifies(headers, body, PAIR.public)
    assert verifies(headers, body, PAIR.public, audience=URL)
    assert not verifies(headers, body, OTHER_PAIR.public)
    Webhook(SECRET).verify(body, headers, json_parse=False)


@given(body=bodies, message_id=ids, url=urls, other=urls)
def test_a_message_is_bound_to_its_url(body, message_id, url, other):
    """C7: only the URL that was called verifies the audience, also with one key for all; every
    library of the convention can do so."""
    headers = signed_headers([PAIR, SymmetricKey(SECRET)], message_id, url, body, datetime.now(UTC))
    for verifying in (PAIR.public, SECRET):
        assert verifies(headers, body, verifying, audience=url)
        assert verifies(headers, body, verifying, audience=other) == (other == url)
        # Neither signature passes for the other one.
        swapped = {**headers, "webhook-audience-signature": headers["webhook-signature"]}
        assert not verifies(swapped, body, verifying, audience=url)
        swapped = {**headers, "webhook-signature": headers["webhook-audience-signature"]}
        assert not verifies(swapped, body, verifying)
    bound = {
        "webhook-id": f"{url} {message_id}",
        "webhook-timestamp": headers["webhook-timestamp"],
        "webhook-signature": headers["webhook-audience-signature"],
    }
    Webhook(SECRET).verify(body, bound, json_parse=False)


@given(body=bodies, message_id=ids, url=urls, changed=st.sampled_from(["body", "id", "timestamp"]))
def test_nothing_signed_can_be_changed(body, message_id, url, changed):
    """C7: another body, id or time verifies nothing."""
    headers = signed_headers([SymmetricKey(SECRET)], message_id, url, body, datetime.now(UTC))
    if changed == "body":
        body += b"."
    elif changed == "id":
        headers["webhook-id"] += "x"
    else:
        headers["webhook-timestamp"] = str(int(headers["webhook-timestamp"]) - 1)
    assert not verifies(headers, body, SECRET)
    assert not verifies(headers, body, SECRET, audience=url)
