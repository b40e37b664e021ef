"""TLS and SASL of every Kafka client, and the reason why a broker refused one.

This is the one place that makes aiokafka's arguments of the settings: for producers, consumers and
admin clients. It fails closed: brokers' certificates and names are always verified, without a
fallback.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import cache
from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.conn import create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.metadata import MetadataRequest

from penstock.errors import KafkaRefused, KafkaUnavailable, SettingsError
from penstock.kafka.client.tokens import ClientCredentials, TokenRefusedError, read_secret
from penstock.settings import Kafka

# Seconds to find out why a server refuses.
_PROBE_S = 10.0


def arguments(settings: Kafka) -> dict[str, Any]:
    """The arguments of every aiokafka client; files are read now.

    Raises:
        SettingsError: a certificate, key or password cannot be read or used.
    """
    protocol = settings.kafka_protocol
    found: dict[str, Any] = {"bootstrap_servers": settings.kafka, "security_protocol": protocol}
    if protocol.endswith("SSL"):
        found["ssl_context"] = _tls(settings)
    if protocol.startswith("SASL"):
        found["sasl_mechanism"] = settings.kafka_mechanism
        if settings.kafka_mechanism == "OAUTHBEARER":
            # One provider for all clients of the process; otherwise each would fetch a token of its
            # own.
            found["sasl_oauth_token_provider"] = _tokens(settings)
        else:
            found["sasl_plain_username"] = settings.kafka_user
            found["sasl_plain_password"] = settings.kafka_password or _password(settings)
    return found


_tokens = cache(ClientCredentials)


def _password(settings: Kafka) -> str:
    file = settings.kafka_password_file
    try:
        password = read_secret(file)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"PENSTOCK_KAFKA_PASSWORD_FILE={file} cannot be read: {type(error).__name__}"
        ) from error
    if not password:
        raise SettingsError(f"PENSTOCK_KAFKA_PASSWORD_FILE={file} is empty: it must hold the password")
    return password


def _tls(settings: Kafka) -> ssl.SSLContext:
    ca, cert, key = settings.kafka_ca_file, settings.kafka_cert_file, settings.kafka_key_file
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"PENSTOCK_KAFKA_CA_FILE={ca} holds no certificate that can be read (PEM): {error}"
        ) from error
    if cert:

        def passphrase() -> str:
            # Without this, OpenSSL would prompt on the terminal.
            raise SettingsError(
                f"PENSTOCK_KAFKA_KEY_FILE={key} has a passphrase, which no setting can provide: store the key without one"
            )

        try:
            context.load_cert_chain(cert, key, password=passphrase)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"PENSTOCK_KAFKA_CERT_FILE={cert} and PENSTOCK_KAFKA_KEY_FILE={key} are not a certificate and its key "
                f"(PEM): {error}"
            ) from error
    return context


async def why_refused(client: AIOKafkaClient) -> KafkaRefused | KafkaUnavailable | None:
    """Asks each bootstrap server why a client cannot connect: aiokafka only logs it.

    Returns what to change, or None when no server refuses: none can be reached, or one accepts by
    now. A server that closes the connection in the handshake may be starting, or may use another
    protocol, so a retry may succeed.
    """
    refused = None
    if client._security_protocol == "PLAINTEXT":  # noqa: SLF001 (see `_connect`)
        return None
    for host, port, _family in client.hosts:
        try:
            async with asyncio.timeout(_PROBE_S):
                connection = await _connect(client, host, port)
        except (OSError, KafkaError, TimeoutError) as error:
            refused = refused or _refusal(client, f"{host}:{port}", error)
            continue
        try:
            # The handshake succeeds even if the broker refuses the token or the certificate; a
            # request does not.
            async with asyncio.timeout(_PROBE_S):
                answer = await connection.send(MetadataRequest([]))
            if not answer.brokers:
                raise KafkaConnectionError("names no broker")
        except (OSError, KafkaError, TimeoutError) as error:
            refused = refused or _refusal(client, f"{host}:{port}", error, connected=True)
        else:
            return None
        finally:
            connection.close()
    return refused


async def _connect(client: AIOKafkaClient, host: str, port: int) -> Any:
    return await create_conn(
        host,
        port,
        client_id=client._client_id,  # noqa: SLF001 (all of these: what the client itself connects with)
        request_timeout_ms=int(_PROBE_S * 1000),
        ssl_context=client._ssl_context,  # noqa: SLF001
        security_protocol=client._security_protocol,  # noqa: SLF001
        sasl_mechanism=client._sasl_mechanism,  # noqa: SLF001
        sasl_plain_username=client._sasl_plain_username,  # noqa: SLF001
        sasl_plain_password=client._sasl_plain_password,  # noqa: SLF001
        sasl_oauth_token_provider=client._sasl_oauth_token_provider,  # noqa: SLF001
    )


def _refusal(
    client: AIOKafkaClient, where: str, error: BaseException, *, connected: bool = False
) -> KafkaRefused | KafkaUnavailable | None:
    protocol, mechanism = client._security_protocol, client._sasl_mechanism  # noqa: SLF001 (see above)
    reason = _tls_reason(error) if protocol.endswith("SSL") else None
    if reason is None and protocol.startswith("SASL"):
        if isinstance(error, SaslAuthenticationFailed):
            who = f"user {client._sasl_plain_username!r} by {mechanism}"  # noqa: SLF001 (see above)
            if mechanism == "OAUTHBEARER":
                who = "the token"
            reason = (
                f"it does not accept {who} ({_text(error)}): check PENSTOCK_KAFKA_USER and PENSTOCK_KAFKA_PASSWORD_FILE, "
                "and that the cluster knows this user for this mechanism"
            )
        elif isinstance(error, UnsupportedSaslMechanismError):
            reason = f"its listener does not offer {mechanism}: set PENSTOCK_KAFKA_MECHANISM to one it offers ({_text(error)})"
        elif isinstance(error, IllegalSaslStateError):
            reason = f"its listener does not use SASL: set PENSTOCK_KAFKA_PROTOCOL to {protocol.removeprefix('SASL_')}"
        elif isinstance(error, TokenRefusedError):
            reason = _text(error)
        elif mechanism == "OAUTHBEARER" and connected and isinstance(error, KafkaConnectionError):
            reason = (
                "it does not accept the token: check that the cluster trusts the issuer at PENSTOCK_KAFKA_TOKEN_URL, and "
                "expects the audience and scope of PENSTOCK_KAFKA_SCOPE"
            )
    if reason is not None:
        return KafkaRefused(f"Kafka at {where} refuses: {reason}")
    if isinstance(error, ConnectionResetError | ConnectionAbortedError | EOFError) and protocol.endswith(
        "SSL"
    ):
        return KafkaUnavailable(
            f"Kafka at {where} closes the connection in the TLS handshake: it is starting, or its listener does not use TLS: check the "
            "port, or PENSTOCK_KAFKA_PROTOCOL"
        )
    return None


def _tls_reason(error: BaseException) -> str | None:
    # aiokafka wraps errors that come after the handshake.
    for cause in (error, error.__cause__, error.__context__, *error.args):
        if isinstance(cause, ssl.SSLCertVerificationError):
            advice = "check that PENSTOCK_KAFKA_CA_FILE holds the authority that signed it"
            if "ostname" in cause.verify_message or "IP address" in cause.verify_message:
                advice = (
                    "its names must hold the one in PENSTOCK_KAFKA, and what the broker itself advertises"
                )
            return f"its certificate does not verify ({cause.verify_message}): {advice}"
        if isinstance(cause, ssl.SSLError):
            if "ALERT" in (cause.reason or ""):
                return (
                    f"it does not accept the certificate of this process ({cause.reason}): check PENSTOCK_KAFKA_CERT_FILE "
                    "and PENSTOCK_KAFKA_KEY_FILE, and the authorities the cluster trusts"
                )
            return (
                f"its listener does not use TLS ({cause.reason}): check the port, or PENSTOCK_KAFKA_PROTOCOL"
            )
    return None


def _text(error: BaseException) -> str:
    return (
        "; ".join(str(argument) for argument in error.args if isinstance(argument, str))
        or type(error).__name__
    )
