"""Digests of submitted contexts, by which two submissions with one idempotency key are compared."""

from __future__ import annotations

import dataclasses
import hashlib

import orjson

from penstock.contracts.context import ContentType, Context
from penstock.contracts.submission import Submission

# 128 bits: a producer gains nothing by a collision, which would only hide its own mistake.
_BYTES = 16


def digest_of(context: Context) -> bytes:
    """The digest of a context: equal JSON values have one digest, in any order of their members.

    A context by reference has that of its bytes, which are not read here.
    """
    if context.ref is not None:
        kind, data = "ref", context.ref.sha256.encode()
    elif context.content_type is ContentType.JSON:
        kind, data = "json", orjson.dumps(context.decode(), option=orjson.OPT_SORT_KEYS)
    else:
        kind, data = context.content_type.value, context.data or b""
    return hashlib.sha256(kind.encode() + b"\0" + data).digest()[:_BYTES]


def with_digest(submission: Submission) -> Submission:
    """A submission with the digest of its context, if it has an idempotency key."""
    if submission.idempotency_key is None:
        return submission
    return dataclasses.replace(submission, context_digest=digest_of(submission.context))
