"""A broker that authenticates its clients (TLS, SASL by every mechanism) and whose access lists
deny by default."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import trustme
from aiohttp import BasicAuth, web
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from penstock.kafka.topology import acls
from penstock.local.broker import EmbeddedKafka, Node
from penstock.local.supervisor import Supervisor

PASSWORD = "correct horse battery"
# A superuser; clients of the plain text listener are superusers too, for the fixtures.
PLATFORM = "platform"
CLIENT_SECRET = "client secret: 100% / safe"


@dataclass(frozen=True)
class SecureKafka:
    """The broker's addresses, and the settings of its clients."""

    broker: EmbeddedKafka
    folder: Path

    @property
    def plain(self) -> str:
        return self.broker.servers

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def tls(self) -> dict[str, str]:
        return {
            "kafka": self.broker.listener("TLS"),
            "kafka_protocol": "SSL",
            "kafka_ca_file": self.file("ca.pem"),
            "kafka_cert_file": self.file("client.pem"),
            "kafka_key_file": self.file("client.key"),
        }

    def scram(self, mechanism: str = "SCRAM-SHA-512") -> dict[str, str]:
        return {
            "kafka": self.broker.listener("SASL_TLS"),
            "kafka_protocol": "SASL_SSL",
            "kafka_ca_file": self.file("ca.pem"),
            "kafka_mechanism": mechanism,
            "kafka_user": PLATFORM,
            "kafka_password_file": self.file("password"),
        }

    def tokens(self, url: str) -> dict[str, str]:
        found = self.scram("OAUTHBEARER")
        del found["kafka_user"], found["kafka_password_file"]
        return {
            **found,
            "kafka_token_url": url,
            "kafka_client_id": PLATFORM,
            "kafka_client_secret_file": self.file("client-secret"),
            "kafka_scope": "kafka",
        }

    def service(self, name: str) -> dict[str, str]:
        return {
            "kafka": self.broker.listener("SASL_PLAIN"),
            "kafka_protocol": "SASL_PLAINTEXT",
            "kafka_mechanism": "PLAIN",
            "kafka_user": name,
            "kafka_password": PASSWORD,
        }


async def start_secure_kafka(supervisor: Supervisor, folder: Path) -> SecureKafka:
    folder.mkdir(parents=True, exist_ok=True)
    _write_certificates(folder)
    (folder / "password").write_text(PASSWORD + "\n")
    (folder / "client-secret").write_text(CLIENT_SECRET)
    login = "org.apache.kafka.common.security"
    users = "".join(f' user_{name}="{PASSWORD}"' for name in (PLATFORM, *acls.SERVICES))
    plain = f"{login}.plain.PlainLoginModule required{users};"
    node = Node(
        name="secure-kafka",
        listeners={"TLS": "SSL", "SASL_TLS": "SASL_SSL", "SASL_PLAIN": "SASL_PLAINTEXT"},
        properties={
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(folder / "broker.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(folder / "ca.pem"),
            "listener.name.tls.ssl.client.auth": "required",
            "ssl.principal.mapping.rules": "RULE:^.*$/certificate/",
            "listener.name.sasl_tls.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            "listener.name.sasl_tls.plain.sasl.jaas.config": plain,
            **{
                f"listener.name.sasl_tls.scram-sha-{bits}.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;"
                for bits in (256, 512)
            },
            # The broker takes unsigned tokens with the right claims. That is enough to see
            # that tokens arrive and are renewed.
            "listener.name.sasl_tls.oauthbearer.sasl.jaas.config": f"{login}.oauthbearer.OAuthBearerLoginModule required "
            'unsecuredLoginStringClaim_sub="broker";',
            # The broker closes the connection of a client whose token has expired.
            "listener.name.sasl_tls.oauthbearer.connections.max.reauth.ms": "3600000",
            "listener.name.sasl_plain.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plain.plain.sasl.jaas.config": plain,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:ANONYMOUS;User:{PLATFORM};User:certificate",
        },
        format_arguments=tuple(
            part
            for bits in (256, 512)
            for part in ("--add-scram", f'SCRAM-SHA-{bits}=[name={PLATFORM},password="{PASSWORD}"]')
        ),
    )
    broker = EmbeddedKafka(supervisor, folder, node=node)
    await broker.start(timeout_s=300.0)
    return SecureKafka(broker, folder)


def _write_certificates(folder: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other-ca.pem")
    for name, issuer in (("client", authority), ("stranger", other)):
        issued = issuer.issue_cert(f"{name}@example.org")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    # Kafka reads PKCS #8 only.
    key = load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    (folder / "broker.pem").write_bytes(key + issued.cert_chain_pems[0].bytes())


class Issuer:
    """Issues unsigned tokens to one client, and counts them."""

    def __init__(self) -> None:
        self.url = ""
        self.issued = 0
        self.life_s = 3600
        self.key = CLIENT_SECRET
        # Further claims of its tokens.
        self.claims: Mapping[str, Any] = {}

    async def answer(self, request: web.Request) -> web.Response:
        who = (
            BasicAuth.decode(request.headers["Authorization"]) if "Authorization" in request.headers else None
        )
        form = await request.post()
        if who is None or (unquote_plus(who.login), unquote_plus(who.password)) != (PLATFORM, self.key):
            return web.json_response({"error": "invalid_client"}, status=401)
        if dict(form) != {"grant_type": "client_credentials", "scope": "kafka"}:
            return web.json_response({"error": "invalid_request"}, status=400)
        self.issued += 1
        now = time.time()
        claims = {"sub": PLATFORM, "iat": now, "exp": now + self.life_s, "scope": "kafka", **self.claims}
        return web.json_response(
            {"access_token": f"{_part({'alg': 'none'})}.{_part(claims)}.", "expires_in": self.life_s}
        )


def _part(document: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(dict(document)).encode()).rstrip(b"=").decode()


@asynccontextmanager
async def issuing() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    app = web.Application()
    app.router.add_post("/token", issuer.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}/token"
    try:
        yield issuer
    finally:
        await runner.cleanup()
