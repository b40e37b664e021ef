"""Clients of the gateway and of providers, towards one server that keeps the request lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from penstock.client import Client
from penstock.gateway.oidc import OidcAuthenticator
from penstock.gateway.settings import GatewaySettings
from penstock.kafka.client.tokens import ClientCredentials
from penstock.settings import Kafka
from penstock.worker.gateway_client import GatewayClient

# As a proxy may send it: policies and cookies.
LARGE_HEAD = (b"x-policy: " + b"a" * 30_000 + b"\r\n") + b"set-cookie: a=b\r\n" * 300
BODY = b'{"tasks": [], "access_token": "t"}'


class Server:
    """Answers each request in the same way."""

    def __init__(self) -> None:
        self.url = ""
        self.lines: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.lines.append(head.partition(b"\r\n")[0].decode())
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
            + LARGE_HEAD
            + b"content-length: %d\r\n\r\n" % len(BODY)
            + BODY
        )
        await reader.read()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    async with await asyncio.start_server(server.handle, "127.0.0.1", 0) as listening:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield server


async def by_client(url: str, _folder: Path) -> None:
    async with Client(f"{url}/%7Ea") as client:
        await client._request("GET", "/types/..", query=[("label", "a/b c")])


async def by_worker(url: str, _folder: Path) -> None:
    async with GatewayClient(f"{url}/%7Ea") as gateway:
        await gateway.post("/hold_task", {"type": "t"})


async def by_gateway(url: str, _folder: Path) -> None:
    async with OidcAuthenticator(GatewaySettings()) as authenticator:
        await authenticator._fetch_json(f"{url}/realms/a%2Fb%40c/keys?")


async def by_kafka_client(url: str, folder: Path) -> None:
    secret = folder / "secret"
    secret.write_text("s")
    settings = Kafka(kafka_token_url=f"{url}/%7Ea/token?x=%2F", kafka_client_secret_file=str(secret))
    assert await ClientCredentials(settings).token() == "t"


@pytest.mark.parametrize(
    ("request_by", "line"),
    [
        (by_client, "GET /%7Ea/types/..?label=a/b+c HTTP/1.1"),
        (by_worker, "POST /%7Ea/hold_task HTTP/1.1"),
        (by_gateway, "GET /realms/a%2Fb%40c/keys? HTTP/1.1"),
        (by_kafka_client, "POST /%7Ea/token?x=%2F HTTP/1.1"),
    ],
)
async def test_a_url_is_sent_as_it_was_given_and_a_large_head_is_read(
    server: Server, tmp_path: Path, request_by: Callable[[str, Path], Awaitable[None]], line: str
) -> None:
    """O8: a proxy or a provider between gets the URL of the setting, and may send large heads."""
    await request_by(server.url, tmp_path)
    assert server.lines == [line]
