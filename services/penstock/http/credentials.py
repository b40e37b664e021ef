"""Credentials of clients: the `Authorization` header with an API key or bearer token."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import SettingsError

# The characters of a bearer token (RFC 6750).
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


def bearer(token: str | None) -> dict[str, str]:
    """The header with an API key or token; empty without a token.

    Raises:
        SettingsError: the token has invalid characters. The message does not quote it.
    """
    text = (token or "").strip()
    if not text:
        return {}
    if not _TOKEN.fullmatch(text):
        raise SettingsError(
            "PENSTOCK_API_KEY is no API key or bearer token: set it to the key that `penstock keys` printed"
        )
    return {"Authorization": f"Bearer {text}"}


class Credentials:
    """The header with an API key or token, from a setting or from a file.

    The file is read at the start, and again when a gateway refuses its token. So a mounted secret
    can be rotated without a restart.

    Args:
        token: the API key or token; empty is none.
        file: path of a file with the API key or token; empty is none.

    Raises:
        SettingsError: both are given, the file cannot be read, or the token is invalid. The message
            does not quote it.
    """

    def __init__(self, token: str = "", file: str = "") -> None:
        if token.strip() and file:
            raise SettingsError(
                "PENSTOCK_API_KEY and PENSTOCK_API_KEY_FILE are both set: leave one of them out"
            )
        self._file = Path(file) if file else None
        self._headers = bearer(token) if self._file is None else _read_file(self._file)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Credentials:
        """The credentials in PENSTOCK_API_KEY or PENSTOCK_API_KEY_FILE.

        Raises:
            SettingsError: see `Credentials`.
        """
        variables = os.environ if environ is None else environ
        return cls(variables.get("PENSTOCK_API_KEY", ""), variables.get("PENSTOCK_API_KEY_FILE", ""))

    @property
    def headers(self) -> Mapping[str, str]:
        """The current header."""
        return self._headers

    @property
    def source(self) -> str:
        """The setting or file in which an operator replaces the token."""
        return "PENSTOCK_API_KEY" if self._file is None else str(self._file)

    @property
    def needs_restart(self) -> bool:
        """Whether a new token takes effect only after a restart."""
        return self._file is None

    def refreshed(self, refused: Mapping[str, str]) -> bool:
        """Reads the file again; returns whether the header differs from the refused one.

        Raises:
            SettingsError: the file has no valid token, and no other header is known. The file may
                be in the middle of a rotation, so a later call may succeed. The message does not
                quote the token.
        """
        if self._file is not None:
            try:
                self._headers = _read_file(self._file)
            except SettingsError:
                # A concurrent request may have read a new token before.
                if self._headers == refused:
                    raise
        return self._headers != refused


def _read_file(file: Path) -> dict[str, str]:
    try:
        header = bearer(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"PENSTOCK_API_KEY_FILE={str(file)!r} cannot be read: {error}") from error
    except SettingsError:
        raise SettingsError(f"PENSTOCK_API_KEY_FILE={str(file)!r} holds no API key or bearer token") from None
    if not header:
        raise SettingsError(f"PENSTOCK_API_KEY_FILE={str(file)!r} is empty")
    return header
