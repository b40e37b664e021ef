"""Signatures of callbacks."""

import base64
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from penstock.callbacks.caller import Signer

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
OTHER = "whsec_" + base64.b64encode(b"o" * 32).decode()


@given(body=st.text(), message_id=st.text("abc-_019", min_size=1))
def test_each_active_secret_verifies(body, message_id):
    """C7: during a rotation a target verifies with the old or the new secret, and with no other."""
    signer = Signer([OTHER, SECRET])
    headers = signer.headers(message_id, body.encode(), datetime.now(UTC))
    for secret in (OTHER, SECRET):
        Webhook(secret).verify(body.encode(), headers, json_parse=False)
    assert len(headers["webhook-signature"].split(" ")) == 2
