"""Where callbacks may go: nothing that is not public or allowed is connected to, counted at listeners and at the loop.

No test leaves this machine: 127.0.0.2, when it is allowed, stands for the internet, and 127.0.0.1 for what is inside.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import orjson
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from tests.callback_targets import LOOPBACK, SECRET, bench, owed
from tests.waiting import wait_until

from penstock.callbacks import egress
from penstock.callbacks.calling import Caller, Met, open_caller
from penstock.callbacks.settings import CallbacksSettings
from penstock.process import fastest_loop

INTERNET, INSIDE = "127.0.0.2", "127.0.0.1"
NAME = "target.example"


@dataclass
class Listener:
    """Counts who connects, and answers 204."""

    port: int = 0
    connections: int = 0
    heard: list[bytes] = field(default_factory=list)
    answer: bytes = b"HTTP/1.1 204 No Content\r\nset-cookie: kept=1\r\n\r\n"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heard.append(head)
                writer.write(self.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(*hosts: str, port: int = 0) -> AsyncIterator[Listener]:
    listener = Listener(port)
    servers = []
    for host in hosts:
        server = await asyncio.start_server(listener.handle, host, listener.port)
        listener.port = server.sockets[0].getsockname()[1]
        servers.append(server)
    try:
        yield listener
    finally:
        for server in servers:
            server.close()


@asynccontextmanager
async def calling(*allowed: str, **given: Any) -> AsyncIterator[Caller]:
    settings = CallbacksSettings.load({}, callback_secrets=(SECRET,), callback_allow=allowed, **given)
    async with open_caller(settings) as caller:
        yield caller


async def call(url: str, *allowed: str) -> Met:
    async with calling(*allowed) as caller:
        return await caller.call(owed(url))


@pytest.fixture
async def inside() -> AsyncIterator[Listener]:
    async with listening(INSIDE, "::1") as listener:
        yield listener


@pytest.fixture
async def internet(inside: Listener) -> AsyncIterator[Listener]:
    """On the same port as `inside`, so that only the address decides who is reached."""
    async with listening(INTERNET, port=inside.port) as listener:
        yield listener


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every address that a socket of this loop was told to connect to."""
    seen: list[str] = []
    connect = asyncio.SelectorEventLoop.sock_connect

    async def spy(loop: asyncio.SelectorEventLoop, sock: socket.socket, address: Any) -> None:
        seen.append(address[0])
        await connect(loop, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", spy)
    return seen


@dataclass
class Dns(AbstractResolver):
    """What DNS says of `NAME`: each answer once, the last one for ever; nobody.example is unknown."""

    answers: list[list[str]]
    lookups: int = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        assert family == socket.AF_UNSPEC
        if ".." in host:
            raise egress.BadHostName(host)
        if host != NAME:
            raise OSError(None, "Domain name not found")
        self.lookups += 1
        addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Dns:
    lies = Dns([[INSIDE]])
    monkeypatch.setattr(egress, "make_resolver", lambda: lies)
    return lies


# All lead to this machine when nobody prevents it, or would in another's network.
CANONICAL = [
    *("127.0.0.1", "[::1]", "localhost", "LOCALHOST", "0.0.0.0", "[::]", "127.255.255.254"),
    *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[::ffff:0:127.0.0.1]"),
    *("[64:ff9b::127.0.0.1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::1]", "[2001:0:7f00:1::80ff:fffe]"),
    *("10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "198.18.0.1", "192.0.2.1", "224.0.0.1"),
    *("169.254.169.254", "[fd00:ec2::254]", "168.63.129.16", "192.0.0.192", "100.100.100.200"),
    *("240.0.0.1", "255.255.255.255", "[fe80::1]", "[fe80::1%25lo]", "[::1%25lo]", "[fec0::1]", "[ff02::1]"),
    # Letters, digits (of full width, too) and dots that become others on the way.
    *(
        "①②⑦.⓪.⓪.①",
        "\uff11\uff12\uff17.\uff10.\uff10.\uff11",
        "127。0。0。1",
        "ⓛocalhost",
        "user:word@127.0.0.1",
    ),
]
# Not even URLs to aiohttp.
ODD = [
    *("2130706433", "127.1", "127.0.1", "017700000001", "0177.0.0.1", "127.0.0.01", "127.000.000.001"),
    *("127.0.0.1.", "0", "0000.0.0.0", "127.0.0.1\\@1.1.1.1"),
]


@pytest.mark.parametrize("host", CANONICAL)
async def test_a_forbidden_address_is_not_connected_to(
    inside: Listener, attempts: list[str], host: str
) -> None:
    """C7: whatever form it stands in, no connection is made, and the attempt says why and which setting allows it."""
    met = await call(f"http://{host}:{inside.port}/hook")
    assert (inside.connections, attempts) == (0, [])
    assert met.kind == "Forbidden"
    assert met.message.startswith("the target's address is ")
    assert "PENSTOCK_CALLBACK_ALLOW" in met.message
    # Another day it may be another address, or allowed.
    assert met.callable_target


@pytest.mark.parametrize("host", ["0x7f.1", "0x7f000001", "0x7f.0.0.0x1", "0X7F.1"])
async def test_what_some_programs_take_for_a_number_is_a_name(
    inside: Listener, attempts: list[str], dns: Dns, host: str
) -> None:
    """C7: these are addresses to the operating system's resolver, which is not asked: they are names that DNS does not know."""
    met = await call(f"http://{host}:{inside.port}/hook", *LOOPBACK)
    assert (inside.connections, attempts, dns.lookups) == (0, [], 0)
    assert (met.kind, met.callable_target) == ("Connection", True)


def test_names_that_are_not_answered_keep_nobody_from_being_called() -> None:
    """C5: thirty names whose server says nothing; a numeric address and a name that is known are connected to meanwhile. On
    the loop of the services, whose own lookups and connections share four threads."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        silent, _protocol = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, local_addr=(INSIDE, 0)
        )
        nameserver = f"{INSIDE}:{silent.get_extra_info('sockname')[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(egress, "make_resolver", partial(egress.make_resolver, [nameserver]))
            async with listening(INSIDE, "::1") as listener, calling(*LOOPBACK) as caller:
                hanging = [
                    asyncio.create_task(caller.call(owed(f"http://hangs{number}.example/", number)))
                    for number in range(1, 31)
                ]
                await asyncio.sleep(0)
                for host in (INSIDE, "localhost"):
                    met = await caller.call(owed(f"http://{host}:{listener.port}/hook", 100))
                    assert met.status == 204
                    assert not any(one.done() for one in hanging), "answered only when the others had ended"
                found = await asyncio.gather(*hanging)
        silent.close()
        assert {(met.kind, met.callable_target) for met in found} == {("Connection", True)}

    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(run())


class _Nameserver(asyncio.DatagramProtocol):
    """Knows every name, at `INSIDE` only; a name that begins with `late` only some time after it was first asked for, and from
    then on at once, as one that asks others does."""

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self._first_s: dict[bytes, float] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        loop = asyncio.get_running_loop()
        end = data.index(b"\0", 12) + 1
        name, kind = data[12:end], data[end : end + 2]
        known_s = self._first_s.setdefault(name, loop.time() + self._late_s * name.startswith(b"\4late"))
        # A pointer to the name, class IN, 60 s; of another kind than A there is nothing.
        found = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton(INSIDE) if kind == b"\0\1" else b""
        counts = b"\0\1" + (b"\0\1" if found else b"\0\0") + b"\0\0\0\0"
        answer = data[:2] + b"\x81\x80" + counts + data[12 : end + 4] + found
        loop.call_later(max(0.0, known_s - loop.time()), self._transport.sendto, answer, addr)


async def test_a_name_whose_own_server_takes_its_time_is_found() -> None:
    """C6: the server of names is quick with others, so that c-ares gives it little time; one that it has to ask for itself takes
    nearly two seconds, and is no failed attempt."""
    loop = asyncio.get_running_loop()
    server, _protocol = await loop.create_datagram_endpoint(
        lambda: _Nameserver(late_s=1.9), local_addr=(INSIDE, 0)
    )
    resolver = egress.make_resolver([f"{INSIDE}:{server.get_extra_info('sockname')[1]}"])
    for name in (*(f"quick{number}.example" for number in range(20)), "late.example"):
        found = await resolver.resolve(name, 80, socket.AF_UNSPEC)
        assert {one["host"] for one in found} == {INSIDE}
    await resolver.close()
    server.close()


@pytest.mark.parametrize("host", ODD)
async def test_a_number_in_an_odd_spelling_is_no_target(
    inside: Listener, attempts: list[str], host: str
) -> None:
    """C7: not even with everything allowed: nobody knows what each program on the way makes of it."""
    met = await call(f"http://{host}:{inside.port}/hook", "0.0.0.0/0", "::/0")
    assert (inside.connections, attempts) == (0, [])
    assert (met.kind, met.callable_target) == ("Target", False)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "①②⑦.⓪.⓪.①"],
)
async def test_what_is_allowed_is_called(inside: Listener, host: str) -> None:
    """C7: an allow-list opens the very addresses that are refused without; so each is a way in that works."""
    met = await call(f"http://{host}:{inside.port}/hook", *LOOPBACK, "0.0.0.0/32", "::ffff:0:0/96")
    assert (met.kind, met.status, inside.connections) == ("HTTP", 204, 1)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "::1",
        "10.0.0.1",
        "169.254.169.254",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "fd00:ec2::254",
    ],
)
async def test_a_name_that_leads_to_a_forbidden_address_is_not_connected_to(
    inside: Listener, attempts: list[str], dns: Dns, address: str
) -> None:
    """C7: refused after DNS, and the address that DNS gave is told to nobody."""
    dns.answers = [[address]]
    met = await call(f"http://{NAME}:{inside.port}/hook")
    assert (inside.connections, attempts, dns.lookups) == (0, [], 1)
    assert (met.kind, met.callable_target) == ("Forbidden", True)
    assert address not in met.message


async def test_a_name_that_changes_its_address_between_lookups_gains_nothing(
    inside: Listener, internet: Listener, attempts: list[str], dns: Dns
) -> None:
    """C7: what is judged is what is connected to: one lookup a call, and the second call's address is judged, too."""
    dns.answers = [[INTERNET], [INSIDE]]
    first = await call(f"http://{NAME}:{inside.port}/hook", INTERNET)
    assert (first.status, dns.lookups) == (204, 1)
    # Another session, which remembers neither the answer nor the connection.
    second = await call(f"http://{NAME}:{inside.port}/hook", INTERNET)
    assert (second.kind, dns.lookups) == ("Forbidden", 2)
    assert (internet.connections, inside.connections) == (1, 0)
    assert attempts == [INTERNET]


@pytest.mark.parametrize(
    "answer",
    [
        [INTERNET, INSIDE],
        [INSIDE, INTERNET],
        ["::1", INTERNET],
        [INTERNET, "::1"],
        ["::1", "fd00::1", "10.0.0.1", INSIDE, INTERNET],
    ],
)
async def test_of_several_addresses_only_the_permitted_are_connected_to(
    inside: Listener, internet: Listener, attempts: list[str], dns: Dns, answer: list[str]
) -> None:
    """C7: a good address in the same reply does not open the way to the bad one, nor is it lost for it."""
    dns.answers = [answer]
    met = await call(f"http://{NAME}:{inside.port}/hook", INTERNET)
    assert met.status == 204
    assert (internet.connections, inside.connections, set(attempts)) == (1, 0, {INTERNET})


@pytest.mark.parametrize("answer", [[INTERNET, INSIDE], [INSIDE, INTERNET], [INTERNET, "::1"]])
async def test_a_permitted_address_that_does_not_answer_does_not_open_the_way_to_the_others(
    inside: Listener, attempts: list[str], dns: Dns, answer: list[str]
) -> None:
    """C7: when the good address of a reply refuses, the next one is judged before it is tried."""
    dns.answers = [answer]
    # Nobody listens there on this port.
    met = await call(f"http://{NAME}:{inside.port}/hook", INTERNET)
    assert met.kind in ("Connection", "Forbidden")
    assert (inside.connections, set(attempts)) == (0, {INTERNET})


async def test_several_forbidden_addresses_are_one_refusal(
    inside: Listener, attempts: list[str], dns: Dns
) -> None:
    """C7: of different classes and families, and still `Forbidden` rather than a failure to connect."""
    dns.answers = [["::1", "fd00::1", "10.0.0.1", INSIDE]]
    met = await call(f"http://{NAME}:{inside.port}/hook")
    assert met.kind == "Forbidden"
    assert (inside.connections, attempts) == (0, [])


@pytest.mark.parametrize(
    "url",
    [
        *(
            "tcp://{}/hook",
            "ws://{}/hook",
            "wss://{}/hook",
            "//{}/hook",
            "ftp://{}/hook",
            "unix://{}/run/x.sock",
        ),
        *("unix:///run/x.sock", "file:///etc/passwd", "npipe://./pipe/x", "http+unix://%2Frun%2Fx.sock/hook"),
        *("http:/hook", "http:///hook", "gopher://{}/hook"),
    ],
)
async def test_other_schemes_are_no_targets(inside: Listener, attempts: list[str], url: str) -> None:
    """C7: http and https, and nothing else that aiohttp would speak HTTP to, though its address is allowed."""
    met = await call(url.format(f"{INSIDE}:{inside.port}"), *LOOPBACK)
    assert (met.kind, met.callable_target) == ("Target", False)
    assert (inside.connections, attempts) == (0, [])


@pytest.mark.parametrize("status", ["301", "302", "303", "307", "308"])
async def test_a_redirect_is_an_answer(
    inside: Listener, internet: Listener, attempts: list[str], status: str
) -> None:
    """C7: no redirect is followed, wherever it leads."""
    location = f"http://{INSIDE}:{inside.port}/"
    internet.answer = f"HTTP/1.1 {status} x\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()
    met = await call(f"http://{INTERNET}:{inside.port}/hook", INTERNET)
    assert (met.kind, met.status) == ("HTTP", int(status))
    assert (inside.connections, attempts) == (0, [INTERNET])


async def test_no_proxy_and_no_credentials_come_from_the_environment(
    inside: Listener, internet: Listener, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """C7: a proxy would look targets up behind our back; netrc would tell targets what is not theirs."""
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine {INTERNET} login us password hunter2\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{INSIDE}:{inside.port}")
    met = await call(f"http://{INTERNET}:{inside.port}/hook", INTERNET, *LOOPBACK)
    assert (met.status, inside.connections, internet.connections) == (204, 0, 1)
    assert b"authorization" not in internet.heard[0].lower()


async def test_cookies_are_not_kept(internet: Listener) -> None:
    """C7: what one target sets is sent to nobody, not even to itself."""
    async with calling(INTERNET) as caller:
        for _ in range(2):
            await caller.call(owed(f"http://{INTERNET}:{internet.port}/hook"))
    assert len(internet.heard) == 2
    assert b"cookie" not in b"".join(internet.heard).lower()


async def test_secrets_are_in_nothing_that_is_shown(
    inside: Listener,
    internet: Listener,
    dns: Dns,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C7: neither what signs nor what a URL carries is in what an attempt met, a repr or a log, whatever goes wrong."""
    caplog.set_level(logging.DEBUG)
    where = f"us:hunter2@{INTERNET}:{inside.port}/hunter2?token=hunter2#hunter2"
    dns.answers = [[INSIDE]]
    async with calling(INTERNET, callback_timeout_s=0.3) as caller:

        async def met_by(url: str, answer: bytes = b"") -> Met:
            internet.answer = answer
            return await caller.call(replace(owed(url), body=b'"hunter2"'))

        met = {
            "delivered": await met_by(f"http://{where}", b"HTTP/1.1 204 x\r\n\r\n"),
            "failed": await met_by(f"http://{where}", b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n"),
            "silent": await met_by(f"http://{where}"),
            "nonsense": await met_by(f"http://{where}", b"220 smtp\r\n\r\n"),
            "forbidden": await met_by(f"http://us:hunter2@{NAME}:{inside.port}/hunter2?token=hunter2"),
            "nobody": await met_by(f"http://us:hunter2@{INTERNET}:1/hunter2?token=hunter2"),
            "silent at TLS": await met_by(f"https://{where}"),
            "unknown name": await met_by("http://us:hunter2@nobody.example/hunter2?token=hunter2"),
            "scheme": await met_by(f"ftp://{where}"),
            "no host": await met_by("http://us:hunter2@/hunter2?token=hunter2"),
            "bad host": await met_by("http://us:hunter2@a..b/hunter2?token=hunter2"),
            "bad port": await met_by(f"http://us:hunter2@{INTERNET}:port/hunter2?token=hunter2"),
        }

        def broken(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(f"no idea what to do with http://{where} and {SECRET}")

        monkeypatch.setattr("aiohttp.ClientSession._request", broken)
        met["unforeseen"] = await met_by(f"http://{where}")
    kinds = {name: each.kind for name, each in met.items()}
    assert kinds == {
        **dict.fromkeys(("delivered", "failed"), "HTTP"),
        **dict.fromkeys(("silent", "silent at TLS"), "Timeout"),
        **dict.fromkeys(("nonsense",), "Protocol"),
        **dict.fromkeys(("forbidden",), "Forbidden"),
        **dict.fromkeys(("nobody", "unknown name"), "Connection"),
        **dict.fromkeys(("scheme", "no host", "bad host", "bad port"), "Target"),
        "unforeseen": "RuntimeError",
    }
    key = SECRET.removeprefix("whsec_")
    for shown in [*map(repr, met.values()), caplog.text, repr(caller), repr(vars(caller))]:
        assert "hunter2" not in shown
        assert key not in shown


async def test_a_refusal_is_written_down_and_retried(
    kafka_servers: str,
    prefix: str,
    database: str,
    inside: Listener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C6, C7: the service goes by its schedule, makes no connection, and says in row and log what happened, and no secret."""
    caplog.set_level(logging.INFO)
    async with bench(kafka_servers, prefix, database) as platform:
        refused = owed(f"http://127.0.0.1:{inside.port}/hook?token=hunter2", 1)
        allowed = owed(f"http://[::1]:{inside.port}/hook", 2)
        async with platform.service(callback_allow=("::1/128",), callback_schedule_s=("600",)):
            await platform.owe(refused, allowed)

            async def settled() -> Any:
                rows = await platform.rows()
                return (
                    rows[refused.id]["error"]
                    and rows[allowed.id]["state"] == "delivered"
                    and rows[refused.id]
                )

            row = await wait_until(settled)
    assert orjson.loads(row["error"]) == {
        "kind": "Forbidden",
        "message": "the target's address is loopback, and PENSTOCK_CALLBACK_ALLOW does not allow it",
        "status": None,
        "excerpt": None,
    }
    assert (row["state"], row["attempt"]) == ("pending", 1)
    assert inside.connections == 1
    assert "the target's address is loopback" in caplog.text
    assert "hunter2" not in caplog.text
    assert SECRET.removeprefix("whsec_") not in caplog.text
