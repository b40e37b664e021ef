"""The header by which a client says who it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import SettingsError

# RFC 6750: what a bearer token may consist of.
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


def bearer(token: str | None) -> dict[str, str]:
    """The header with an API key or token; none without one.

    Raises:
        SettingsError: no such token can be sent. Does not quote it.
    """
    text = (token or "").strip()
    if not text:
        return {}
    if not _TOKEN.fullmatch(text):
        raise SettingsError(
            "api_key is no API key or bearer token: set PENSTOCK_API_KEY to what `penstock keys` showed"
        )
    return {"Authorization": f"Bearer {text}"}


class Credentials:
    """The header with an API key or token, which may be in a file that somebody writes anew.

    A file is read at the start, and again when a gateway does not accept what it held: that is how a mounted secret is
    rotated without a restart.

    Args:
        token: the key or token; empty is none.
        file: its file, in place of it; empty is none.

    Raises:
        SettingsError: both are given, the file cannot be read, or what there is cannot be sent. Does not quote it.
    """

    def __init__(self, token: str = "", file: str = "") -> None:
        if token.strip() and file:
            raise SettingsError("api_key and api_key_file are both set: leave one of them out")
        self._file = Path(file) if file else None
        self._headers = bearer(token) if self._file is None else _of_file(self._file)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Credentials:
        """Those of PENSTOCK_API_KEY or PENSTOCK_API_KEY_FILE.

        Raises:
            SettingsError: as the class.
        """
        found = os.environ if environ is None else environ
        return cls(found.get("PENSTOCK_API_KEY", ""), found.get("PENSTOCK_API_KEY_FILE", ""))

    @property
    def headers(self) -> Mapping[str, str]:
        """The header as it is now."""
        return self._headers

    @property
    def source(self) -> str:
        """Where whoever gives out keys has to put another."""
        return "PENSTOCK_API_KEY" if self._file is None else str(self._file)

    @property
    def lasting(self) -> bool:
        """Whether another key is only known after a restart."""
        return self._file is None

    def renewed(self, sent: Mapping[str, str]) -> bool:
        """Whether there is another header by now than the one that was refused; reads the file.

        Raises:
            SettingsError: the file can no longer be read or holds nothing that can be sent, and there is no other header.
                Somebody may be about to write it: the next time tells. Does not quote it.
        """
        if self._file is not None:
            try:
                self._headers = _of_file(self._file)
            except SettingsError:
                # Another request may have read it while there was something in it.
                if self._headers == sent:
                    raise
        return self._headers != sent


def _of_file(file: Path) -> dict[str, str]:
    try:
        header = bearer(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"api_key_file={str(file)!r} cannot be read: {error}") from error
    except SettingsError:
        raise SettingsError(f"api_key_file={str(file)!r} holds no API key or bearer token") from None
    if not header:
        raise SettingsError(f"api_key_file={str(file)!r} is empty")
    return header
