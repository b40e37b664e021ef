"""Removes secrets from texts: in a worker from all that leaves it, elsewhere from reports. Pure.

Redacted are the values of environment variables whose names end as those of secrets do, values that
are registered, and what has the form of a secret: passwords and tokens by name, credentials
in URLs, bearer tokens, private keys, and keys of well-known services.

All patterns take linear time: a handler may log any text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

REDACTED = "[redacted]"

# Shorter values, such as `KEY=1`, are also in texts that have no secret.
SHORTEST_VALUE = 6
# Levels of a field's value; what is deeper becomes text.
MAX_DEPTH = 10

_NAMES = r"(?:passw(?:or)?d|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
# KEY is a word of its own, because other words end with it. PGPASSWORD has no underscore.
_ENVIRONMENT_NAME = re.compile(r"(?:TOKEN|SECRET|PASSWORD|PASSPHRASE|(?:_|^)KEY)$", re.IGNORECASE)
_FIELD_NAME = re.compile(rf"{_NAMES}|^authorization$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a secret.

    Attributes:
        words: a text without any of them has no such secret; in lower case.
        quick: a text in lower case in which this is not found has none either. Patterns that ignore
            case take ten times as long.
        pattern: the secret.
        replacement: for the match.
    """

    words: tuple[str, ...]
    quick: re.Pattern[str]
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str] = REDACTED

    def may_be_in(self, lowered: str) -> bool:
        """Whether a text, in lower case, may have such a secret."""
        return any(word in lowered for word in self.words) and self.quick.search(lowered) is not None


_NAMED = rf"({_NAMES}[\w.-]{{0,40}}[\"']?[ \t]{{0,5}}[=:][ \t]{{0,5}})"
_SERVICE_KEY = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|xox[abeoprs]-[\w-]{10,}"
    r"|sk[-_](?:live|test|proj|ant)?[-_]?[A-Za-z0-9_-]{16,}|AIza[\w-]{30,}|pk_\w{16,})"
)
_FORMS = (
    _Form(
        ("-----begin",),
        re.compile("-----begin"),
        re.compile(
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]*+(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
        ),
    ),
    _Form(
        ("://",),
        re.compile(r"://[^\s/?#@\"'<>]{1,1000}@"),
        re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/?#@\"'<>]{1,1000}@", re.IGNORECASE),
        rf"\1{REDACTED}@",
    ),
    _Form(
        ("bearer", "basic"),
        re.compile(r"bearer\s|basic\s"),
        re.compile(r"\b(bearer|basic)(\s{1,5})[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
        rf"\1\2{REDACTED}",
    ),
    _Form(
        ("passw", "passphrase", "secret", "token", "key", "credential"),
        re.compile(_NAMED),
        re.compile(
            rf"{_NAMED}(?!{re.escape(REDACTED)})(?:\"[^\"\n]*+\"?|'[^'\n]*+'?|[^\s\"',;&)}}\]]++)",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    _Form(
        ("eyj",),
        re.compile("eyj"),
        # The first part is taken as a whole, also without the others: a run such as eyJ-eyJ-… would
        # be read to its end from each of its words.
        re.compile(r"\beyJ[A-Za-z0-9_-]{8,}+(\.[A-Za-z0-9_-]{4,}+\.[A-Za-z0-9_-]*+)?"),
        lambda found: REDACTED if found[1] else found[0],
    ),
    _Form(
        ("sk-", "sk_"),
        # The word is often the end of another one, such as task_id.
        re.compile(r"sk(?<!\wsk)[-_]"),
        _SERVICE_KEY,
    ),
    _Form(
        ("akia", "asia", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "xox", "aiza", "pk_"),
        re.compile("akia|asia|gh[pousr]_|github_pat_|xox|aiza|pk_"),
        _SERVICE_KEY,
    ),
)
# Texts that are searched together.
_TOGETHER = 64


class Redactor:
    """Redacts texts; may be used from any thread.

    Args:
        environment: the values of its secrets are redacted.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._lock = threading.Lock()
        self._values: set[str] = set()
        self._known: re.Pattern[str] | None = None
        self._add(value for name, value in (environment or {}).items() if _ENVIRONMENT_NAME.search(name))

    def add(self, value: str) -> None:
        """Redacts a value from now on, wherever it appears.

        Raises:
            ValueError: it has fewer than `SHORTEST_VALUE` characters.
        """
        if len(value.strip()) < SHORTEST_VALUE:
            raise ValueError(f"a value to redact must have at least {SHORTEST_VALUE} characters")
        self._add([value])

    def _add(self, values: Iterable[str]) -> None:
        added: set[str] = set()
        for value in values:
            stripped = value.strip()
            if len(stripped) >= SHORTEST_VALUE:
                # A secret with several lines appears line by line.
                parts = [part for part in stripped.splitlines() if len(part) >= SHORTEST_VALUE]
                for part in (stripped, *parts):
                    added |= {part, quote(part, safe=""), repr(part)[1:-1]}
        with self._lock:
            if added <= self._values:
                return
            self._values |= added
            # Longer ones first: one may begin with another.
            found = sorted(self._values, key=len, reverse=True)
            self._known = re.compile("|".join(map(re.escape, found)))

    def text(self, text: str) -> str:
        """The text without secrets."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        lowered = text.lower()
        for form in _FORMS:
            # A letter such as İ becomes two in lower case, and may hide a form from its quick test.
            if len(lowered) != len(text) or form.may_be_in(lowered):
                text = form.pattern.sub(form.replacement, text)
                lowered = text.lower()
        return text

    def texts(self, texts: Sequence[str]) -> list[str]:
        """The texts without secrets, each by itself.

        It takes a fraction of the time of `text` for each of them.
        """
        kept: list[str] = []
        for begin in range(0, len(texts), _TOGETHER):
            some = texts[begin : begin + _TOGETHER]
            # A secret of a text is also found among several. What is found across two of them, such
            # as the lines of a key, is judged text by text.
            together = "\n".join(some)
            clean = self.text(together) == together
            kept += some if clean else map(self.text, some)
        return kept

    def fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields without secrets: those with the name of one are replaced whole."""
        return self._members(fields, 0)

    def _members(self, members: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        return {
            self.text(str(name)): REDACTED if _FIELD_NAME.search(str(name)) else self._value(value, depth)
            for name, value in members.items()
        }

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth < MAX_DEPTH and isinstance(value, Mapping):
            return self._members(value, depth + 1)
        if depth < MAX_DEPTH and isinstance(value, list | tuple):
            return [self._value(item, depth + 1) for item in value]
        return self.text(str(value))


# For texts of other processes: knows the forms of secrets, and no values.
BY_FORM = Redactor()
