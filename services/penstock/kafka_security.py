"""Checks the settings of TLS and SASL for Kafka; `kafka/client/security.py` uses them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

KAFKA_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
KAFKA_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_TLS_SETTINGS = ("kafka_ca_file", "kafka_cert_file", "kafka_key_file")
_USER_SETTINGS = ("kafka_user", "kafka_password_file", "kafka_password")
_TOKEN_SETTINGS = ("kafka_token_url", "kafka_client_id", "kafka_client_secret_file", "kafka_scope")
_OPTIONAL = ("kafka_password_file", "kafka_password", "kafka_scope")
_FILES = (*_TLS_SETTINGS, "kafka_password_file", "kafka_client_secret_file")


def security_problems(settings: Mapping[str, Any]) -> list[str]:
    """Contradictions between the settings of TLS and SASL; no sentence contains a secret.

    Args:
        settings: values of `settings.Kafka` by name.
    """
    protocol, mechanism = settings["kafka_protocol"], settings["kafka_mechanism"]
    if protocol not in KAFKA_PROTOCOLS:
        return [f"kafka_protocol={protocol!r} must be one of {', '.join(KAFKA_PROTOCOLS)}"]
    sasl, encrypted = protocol.startswith("SASL"), protocol.endswith("SSL")
    if sasl and mechanism not in KAFKA_MECHANISMS:
        return [
            f"kafka_protocol={protocol} needs kafka_mechanism, one of {', '.join(KAFKA_MECHANISMS)}"
            + (f", not {mechanism!r}" if mechanism else "")
        ]
    required = _TOKEN_SETTINGS if mechanism == "OAUTHBEARER" else _USER_SETTINGS
    problems = [
        # An unused credential is a problem: the operator would believe the connection to be safer
        # than it is.
        f"{name} is set, but kafka_protocol={protocol} never uses it: use {better}, or leave it out"
        for names, used, better in (
            (_TLS_SETTINGS, encrypted, "SSL or SASL_SSL"),
            (("kafka_mechanism", *_USER_SETTINGS, *_TOKEN_SETTINGS), sasl, "SASL_SSL"),
        )
        for name in names
        if settings[name] and not used
    ]
    if sasl:
        problems += [
            f"{name} is set, but kafka_mechanism={mechanism} never uses it: leave it out"
            for name in (*_USER_SETTINGS, *_TOKEN_SETTINGS)
            if settings[name] and name not in required
        ]
        problems += [
            f"kafka_mechanism={mechanism} needs {name}"
            for name in required
            if name not in _OPTIONAL and not settings[name]
        ]
        if required is _USER_SETTINGS and bool(settings["kafka_password"]) == bool(
            settings["kafka_password_file"]
        ):
            problems.append(f"kafka_mechanism={mechanism} needs either kafka_password_file or kafka_password")
        if settings["kafka_token_url"] and not _is_private(settings["kafka_token_url"]):
            problems.append(
                f"kafka_token_url={settings['kafka_token_url']} must begin with https://: the client's secret is sent there"
            )
    if bool(settings["kafka_cert_file"]) != bool(settings["kafka_key_file"]):
        problems.append("kafka_cert_file and kafka_key_file must be set both or neither")
    for name in _FILES:
        if settings[name]:
            problems += unreadable(name, settings[name])
    return problems


def _is_private(url: str) -> bool:
    """Whether requests to a URL cannot be read on the way: it is https, or on this machine."""
    parts = urlsplit(url)
    return bool(parts.hostname) and (
        parts.scheme == "https"
        or (parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1"))
    )


def unreadable(name: str, file: str) -> list[str]:
    """Why the file of a setting cannot be read; empty if it can."""
    if not Path(file).is_file():
        return [f"{name}={file}: this file does not exist"]
    return (
        []
        if os.access(file, os.R_OK)
        else [f"{name}={file} cannot be read by this user: change its permissions"]
    )
