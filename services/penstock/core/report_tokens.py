"""The tokens of attempts, which reports on Kafka repeat.

Kafka does not tell who wrote a record, and the ids, steps and attempts of other namespaces can be
guessed. So each ready record has a token that only its readers know. Without it, a worker of one
namespace could claim, prolong or end an attempt of another.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Collection, Iterable, Sequence

from penstock.core.attempt import AttemptId

# 96 bits, too many to guess by sending records. A token has 16 characters.
_BYTES = 12


class ReportTokens:
    """Makes and checks tokens. A token is the beginning of an HMAC of its attempt.

    Args:
        keys: each the base64 of 32 bytes. The first makes tokens, and all check them. Without keys
            there are no tokens, and each report is accepted.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [base64.b64decode(key) for key in keys]

    def __bool__(self) -> bool:
        """Whether reports need tokens."""
        return bool(self._keys)

    def of(self, attempt_id: AttemptId) -> str | None:
        """The token of an attempt; None without keys."""
        return _token(self._keys[0], attempt_id) if self._keys else None

    def unproven(self, attempt_ids: Iterable[AttemptId], given: Collection[str]) -> set[AttemptId]:
        """Those of the attempts whose token is not among the given ones; none without keys."""
        if not self:
            return set()
        return {
            attempt_id
            for attempt_id in attempt_ids
            if not any(_token(key, attempt_id) in given for key in self._keys)
        }


def _token(key: bytes, attempt_id: AttemptId) -> str:
    digest = hmac.digest(key, b"%d.%d.%d" % attempt_id, "sha256")
    return base64.urlsafe_b64encode(digest[:_BYTES]).decode()
