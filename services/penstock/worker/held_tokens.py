"""The tokens of the attempts that a worker holds, for its reports on Kafka."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.contracts.ready import ReadyTask
from penstock.contracts.report_tokens import headers_of_tokens
from penstock.core.attempt import AttemptId


class HeldTokens:
    """Tokens from the ready record of an attempt until its lease has ended."""

    def __init__(self) -> None:
        self._tokens: dict[AttemptId, str] = {}

    def add(self, ready: ReadyTask) -> None:
        """Keeps the token of an attempt, if it has one."""
        if ready.token is not None:
            self._tokens[ready.attempt_id] = ready.token

    def drop(self, attempt_ids: Iterable[AttemptId]) -> None:
        """Forgets attempts of which nothing more is reported."""
        for attempt_id in attempt_ids:
            self._tokens.pop(attempt_id, None)

    def copy(self, attempt_ids: Iterable[AttemptId]) -> HeldTokens:
        """The tokens of these attempts, as of now."""
        found = HeldTokens()
        if self._tokens:
            found._tokens = {each: self._tokens[each] for each in attempt_ids if each in self._tokens}
        return found

    def headers(self, attempt_ids: Iterable[AttemptId]) -> list[tuple[str, bytes]]:
        """The headers of a record about these attempts."""
        return headers_of_tokens(map(self._tokens.get, attempt_ids)) if self._tokens else []
