"""Egress control: callbacks connect only to public or allowed addresses.

The tests count connections at the listeners and at the event loop. No test leaves this machine:
an allowed 127.0.0.2 stands for the internet, and 127.0.0.1 for the internal network.
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
from tests.support.callback_targets import LOOPBACK, SECRET, bench, keys_of, make_callback
from tests.support.waiting import wait_until

from penstock.callbacks import egress
from penstock.callbacks.caller import Caller, CallResult, open_caller
from penstock.callbacks.settings import CallbacksSettings
from penstock.concurrency.event_loop import event_loop_factory

INTERNET, INTERNAL = "127.0.0.2", "127.0.0.1"
NAME = "target.example"


@dataclass
class Listener:
    """Counts connections and answers 204."""

    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    answer: bytes = b"HTTP/1.1 204 No Content\r\nset-cookie: kept=1\r\n\r\n"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests.append(head)
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
async def running_caller(*allowed: str, **options: Any) -> AsyncIterator[Caller]:
    settings = CallbacksSettings.load({}, callback_secrets=(SECRET,), callback_allow=allowed, **options)
    async with open_caller(settings, keys_of) as caller:
        yield caller


async def call(url: str, *allowed: str) -> CallResult:
    async with running_caller(*allowed) as caller:
        return await caller.call(make_callback(url))


@pytest.fixture
async def internal() -> AsyncIterator[Listener]:
    async with listening(INTERNAL, "::1") as listener:
        yield listener


@pytest.fixture
async def internet(internal: Listener) -> AsyncIterator[Listener]:
    """Listens on the port of `internal`, so that only the address selects the listener."""
    async with listening(INTERNET, port=internal.port) as listener:
        yield listener


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every address that a socket of this event loop tried to connect to."""
    addresses: list[str] = []
    connect = asyncio.SelectorEventLoop.sock_connect

    async def spy(loop: asyncio.SelectorEventLoop, sock: socket.socket, address: Any) -> None:
        addresses.append(address[0])
        await connect(loop, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", spy)
    return addresses


@dataclass
class FakeDns(AbstractResolver):
    """A fake DNS: answers for `NAME` in turn, then repeats the last; other names are unknown."""

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
def dns(monkeypatch: pytest.MonkeyPatch) -> FakeDns:
    fake = FakeDns([[INTERNAL]])
    monkeypatch.setattr(egress, "make_resolver", lambda **_: fake)
    return fake


# Without egress control these lead to this machine, or to hosts of another internal network. Each
# takes another way through the URL and the caller; unit tests of addresses have every network.
CANONICAL = [
    *("127.0.0.1", "[::1]", "localhost", "LOCALHOST", "0.0.0.0", "[::]", "169.254.169.254"),
    *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::127.0.0.1]", "[fe80::1%25lo]", "[::1%25lo]"),
    # Unicode letters, digits and dots that normalization turns into ASCII.
    *("①②⑦.⓪.⓪.①", "127。0。0。1", "ⓛocalhost", "user:word@127.0.0.1"),
]
# aiohttp rejects these as URLs.
ODD = [
    *("2130706433", "127.1", "127.0.1", "017700000001", "0177.0.0.1", "127.0.0.01", "127.000.000.001"),
    *("127.0.0.1.", "0", "0000.0.0.0", "127.0.0.1\\@1.1.1.1"),
]


@pytest.mark.parametrize("host", CANONICAL)
async def test_a_forbidden_address_is_not_connected_to(
    internal: Listener, attempts: list[str], host: str
) -> None:
    """C7: no spelling of a forbidden address is connected to.

    The result has the reason and the setting that would allow the address.
    """
    result = await call(f"http://{host}:{internal.port}/hook")
    assert (internal.connections, attempts) == (0, [])
    assert result.kind == "Forbidden"
    assert result.message.startswith("the target's address is ")
    assert "PENSTOCK_CALLBACK_ALLOW" in result.message
    # The target stays callable: its address may change, or operators may allow it.
    assert result.callable_target


@pytest.mark.parametrize("host", ["0x7f.1", "0x7f000001", "0x7f.0.0.0x1", "0X7F.1"])
async def test_a_hexadecimal_address_is_a_name(
    internal: Listener, attempts: list[str], dns: FakeDns, host: str
) -> None:
    """C7: the caller looks a hexadecimal address up in DNS, which does not know it.

    The operating system's resolver, which the caller does not use, would accept it as an address.
    """
    result = await call(f"http://{host}:{internal.port}/hook", *LOOPBACK)
    assert (internal.connections, attempts, dns.lookups) == (0, [], 0)
    assert (result.kind, result.callable_target) == ("Connection", True)


def test_unanswered_names_do_not_delay_other_calls() -> None:
    """C5: thirty unanswered lookups do not delay calls to a numeric address and a known name.

    The test uses the services' event loop. The loop's built-in lookups
    and connections share four threads.
    """

    async def run() -> None:
        loop = asyncio.get_running_loop()
        silent, _protocol = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, local_addr=(INTERNAL, 0)
        )
        nameserver = f"{INTERNAL}:{silent.get_extra_info('sockname')[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(egress, "make_resolver", partial(egress.make_resolver, [nameserver]))
            async with listening(INTERNAL, "::1") as listener, running_caller(*LOOPBACK) as caller:
                unanswered = [
                    asyncio.create_task(caller.call(make_callback(f"http://hangs{number}.example/", number)))
                    for number in range(1, 31)
                ]
                await asyncio.sleep(0)
                for host in (INTERNAL, "localhost"):
                    result = await caller.call(make_callback(f"http://{host}:{listener.port}/hook", 100))
                    assert result.status == 204
                    assert not any(one.done() for one in unanswered), (
                        "the call waited for the unanswered lookups"
                    )
                results = await asyncio.gather(*unanswered)
        silent.close()
        assert {(result.kind, result.callable_target) for result in results} == {("Connection", True)}

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(run())


class _SlowNameserver(asyncio.DatagramProtocol):
    """A name server that resolves every name to `INTERNAL`.

    Names that begin with `late` resolve `late_s` seconds after their first lookup, as at a name
    server that has to query another one.
    """

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
        # The record: a pointer to the name, class IN, 60 s. Only lookups of kind A have a record.
        record = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton(INTERNAL) if kind == b"\0\1" else b""
        counts = b"\0\1" + (b"\0\1" if record else b"\0\0") + b"\0\0\0\0"
        answer = data[:2] + b"\x81\x80" + counts + data[12 : end + 4] + record
        loop.call_later(max(0.0, known_s - loop.time()), self._transport.sendto, answer, addr)


async def test_a_name_that_resolves_slowly_is_found() -> None:
    """C6: a lookup of nearly two seconds succeeds after many quick lookups.

    After quick answers c-ares shortens its timeout for the name server.
    """
    loop = asyncio.get_running_loop()
    server, _protocol = await loop.create_datagram_endpoint(
        lambda: _SlowNameserver(late_s=1.9), local_addr=(INTERNAL, 0)
    )
    resolver = egress.make_resolver([f"{INTERNAL}:{server.get_extra_info('sockname')[1]}"])
    for name in (*(f"quick{number}.example" for number in range(20)), "late.example"):
        results = await resolver.resolve(name, 80, socket.AF_UNSPEC)
        assert {one["host"] for one in results} == {INTERNAL}
    await resolver.close()
    server.close()


@pytest.mark.parametrize("host", ODD)
async def test_an_odd_spelling_of_an_address_is_rejected(
    internal: Listener, attempts: list[str], host: str
) -> None:
    """C7: the caller rejects it even with all addresses allowed, because parsers disagree on it."""
    result = await call(f"http://{host}:{internal.port}/hook", "0.0.0.0/0", "::/0")
    assert (internal.connections, attempts) == (0, [])
    assert (result.kind, result.callable_target) == ("Target", False)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "①②⑦.⓪.⓪.①"],
)
async def test_an_allowed_address_is_called(internal: Listener, host: str) -> None:
    """C7: an allow-list allows addresses that are forbidden by default.

    The calls succeed, so the tests above fail for no other reason than the address.
    """
    result = await call(f"http://{host}:{internal.port}/hook", *LOOPBACK, "0.0.0.0/32", "::ffff:0:0/96")
    assert (result.kind, result.status, internal.connections) == ("HTTP", 204, 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1", "fd00:ec2::254"])
async def test_a_name_that_leads_to_a_forbidden_address_is_not_connected_to(
    internal: Listener, attempts: list[str], dns: FakeDns, address: str
) -> None:
    """C7: the caller refuses the address that DNS returned and keeps it out of its message."""
    dns.answers = [[address]]
    result = await call(f"http://{NAME}:{internal.port}/hook")
    assert (internal.connections, attempts, dns.lookups) == (0, [], 1)
    assert (result.kind, result.callable_target) == ("Forbidden", True)
    assert address not in result.message


async def test_a_name_that_changes_its_address_is_checked_on_each_call(
    internal: Listener, internet: Listener, attempts: list[str], dns: FakeDns
) -> None:
    """C7: each call makes one lookup, checks its address and connects to that same address."""
    dns.answers = [[INTERNET], [INTERNAL]]
    first = await call(f"http://{NAME}:{internal.port}/hook", INTERNET)
    assert (first.status, dns.lookups) == (204, 1)
    # A new session, which has cached neither the answer nor the connection.
    second = await call(f"http://{NAME}:{internal.port}/hook", INTERNET)
    assert (second.kind, dns.lookups) == ("Forbidden", 2)
    assert (internet.connections, internal.connections) == (1, 0)
    assert attempts == [INTERNET]


@pytest.mark.parametrize(
    "answer",
    [
        [INTERNET, INTERNAL],
        [INTERNAL, INTERNET],
        ["::1", INTERNET],
        [INTERNET, "::1"],
        ["::1", "fd00::1", "10.0.0.1", INTERNAL, INTERNET],
    ],
)
async def test_only_the_allowed_addresses_of_a_name_are_connected_to(
    internal: Listener, internet: Listener, attempts: list[str], dns: FakeDns, answer: list[str]
) -> None:
    """C7: an allowed address in a reply is used, and does not allow the forbidden one."""
    dns.answers = [answer]
    result = await call(f"http://{NAME}:{internal.port}/hook", INTERNET)
    assert result.status == 204
    assert (internet.connections, internal.connections, set(attempts)) == (1, 0, {INTERNET})


@pytest.mark.parametrize("answer", [[INTERNET, INTERNAL], [INTERNAL, INTERNET], [INTERNET, "::1"]])
async def test_a_refused_connection_allows_no_forbidden_address(
    internal: Listener, attempts: list[str], dns: FakeDns, answer: list[str]
) -> None:
    """C7: after the allowed address refuses, the caller checks the next one before connecting."""
    dns.answers = [answer]
    # No server listens at the allowed address on this port.
    result = await call(f"http://{NAME}:{internal.port}/hook", INTERNET)
    assert result.kind in ("Connection", "Forbidden")
    assert (internal.connections, set(attempts)) == (0, {INTERNET})


async def test_several_forbidden_addresses_make_one_refusal(
    internal: Listener, attempts: list[str], dns: FakeDns
) -> None:
    """C7: forbidden addresses of several classes and families make the result `Forbidden`."""
    dns.answers = [["::1", "fd00::1", "10.0.0.1", INTERNAL]]
    result = await call(f"http://{NAME}:{internal.port}/hook")
    assert result.kind == "Forbidden"
    assert (internal.connections, attempts) == (0, [])


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
async def test_other_schemes_are_rejected(internal: Listener, attempts: list[str], url: str) -> None:
    """C7: the caller accepts only http and https, although aiohttp supports other schemes."""
    result = await call(url.format(f"{INTERNAL}:{internal.port}"), *LOOPBACK)
    assert (result.kind, result.callable_target) == ("Target", False)
    assert (internal.connections, attempts) == (0, [])


@pytest.mark.parametrize("status", ["301", "302", "303", "307", "308"])
async def test_a_redirect_is_not_followed(
    internal: Listener, internet: Listener, attempts: list[str], status: str
) -> None:
    """C7: a redirect is the result of the call, and its location is not called."""
    location = f"http://{INTERNAL}:{internal.port}/"
    internet.answer = f"HTTP/1.1 {status} x\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()
    result = await call(f"http://{INTERNET}:{internal.port}/hook", INTERNET)
    assert (result.kind, result.status) == ("HTTP", int(status))
    assert (internal.connections, attempts) == (0, [INTERNET])


async def test_the_caller_ignores_proxies_and_credentials_of_the_environment(
    internal: Listener, internet: Listener, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """C7: the caller uses no proxy and no netrc file.

    A proxy would resolve targets without egress control; netrc would send credentials to targets.
    """
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine {INTERNET} login us password hunter2\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{INTERNAL}:{internal.port}")
    result = await call(f"http://{INTERNET}:{internal.port}/hook", INTERNET, *LOOPBACK)
    assert (result.status, internal.connections, internet.connections) == (204, 0, 1)
    assert b"authorization" not in internet.requests[0].lower()


async def test_the_caller_keeps_no_cookies(internet: Listener) -> None:
    """C7: the caller sends no cookie that a target has set, not even to the same target."""
    async with running_caller(INTERNET) as caller:
        for _ in range(2):
            await caller.call(make_callback(f"http://{INTERNET}:{internet.port}/hook"))
    assert len(internet.requests) == 2
    assert b"cookie" not in b"".join(internet.requests).lower()


async def test_no_result_repr_or_log_contains_secrets(
    internal: Listener,
    internet: Listener,
    dns: FakeDns,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C7: no failure puts a signing secret or a URL's secrets into a result, a repr or a log."""
    caplog.set_level(logging.DEBUG)
    authority_and_path = f"us:hunter2@{INTERNET}:{internal.port}/hunter2?token=hunter2#hunter2"
    dns.answers = [[INTERNAL]]
    async with (
        running_caller(INTERNET) as patient,
        running_caller(INTERNET, callback_timeout_s=0.3) as hasty,
    ):

        async def call_with_secrets(url: str, answer: bytes = b"", caller: Caller = patient) -> CallResult:
            internet.answer = answer
            return await caller.call(replace(make_callback(url), body=b'"hunter2"'))

        results = {
            "delivered": await call_with_secrets(f"http://{authority_and_path}", b"HTTP/1.1 204 x\r\n\r\n"),
            "failed": await call_with_secrets(
                f"http://{authority_and_path}", b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n"
            ),
            "silent": await call_with_secrets(f"http://{authority_and_path}", caller=hasty),
            "nonsense": await call_with_secrets(f"http://{authority_and_path}", b"220 smtp\r\n\r\n"),
            "forbidden": await call_with_secrets(
                f"http://us:hunter2@{NAME}:{internal.port}/hunter2?token=hunter2"
            ),
            "closed port": await call_with_secrets(f"http://us:hunter2@{INTERNET}:1/hunter2?token=hunter2"),
            "silent at TLS": await call_with_secrets(f"https://{authority_and_path}", caller=hasty),
            "unknown name": await call_with_secrets(
                "http://us:hunter2@unknown.example/hunter2?token=hunter2"
            ),
            "scheme": await call_with_secrets(f"ftp://{authority_and_path}"),
            "no host": await call_with_secrets("http://us:hunter2@/hunter2?token=hunter2"),
            "bad host": await call_with_secrets("http://us:hunter2@a..b/hunter2?token=hunter2"),
            "bad port": await call_with_secrets(f"http://us:hunter2@{INTERNET}:port/hunter2?token=hunter2"),
        }

        def raise_error(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(f"cannot call http://{authority_and_path} and {SECRET}")

        monkeypatch.setattr("aiohttp.ClientSession._request", raise_error)
        results["unforeseen"] = await call_with_secrets(f"http://{authority_and_path}")
    kinds = {name: result.kind for name, result in results.items()}
    assert kinds == {
        **dict.fromkeys(("delivered", "failed"), "HTTP"),
        **dict.fromkeys(("silent", "silent at TLS"), "Timeout"),
        **dict.fromkeys(("nonsense",), "Protocol"),
        **dict.fromkeys(("forbidden",), "Forbidden"),
        **dict.fromkeys(("closed port", "unknown name"), "Connection"),
        **dict.fromkeys(("scheme", "no host", "bad host", "bad port"), "Target"),
        "unforeseen": "RuntimeError",
    }
    signing_key = SECRET.removeprefix("whsec_")
    callers = [shown for caller in (patient, hasty) for shown in (repr(caller), repr(vars(caller)))]
    for shown in [*map(repr, results.values()), caplog.text, *callers]:
        assert "hunter2" not in shown
        assert signing_key not in shown


async def test_a_refusal_is_recorded_and_retried(
    kafka_servers: str,
    prefix: str,
    database: str,
    internal: Listener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C6, C7: a refused callback makes no connection and is retried by the schedule.

    Row and log have the reason and no secret.
    """
    caplog.set_level(logging.INFO)
    async with bench(kafka_servers, prefix, database) as platform:
        refused = make_callback(f"http://127.0.0.1:{internal.port}/hook?token=hunter2", 1)
        allowed = make_callback(f"http://[::1]:{internal.port}/hook", 2)
        async with platform.service(callback_allow=("::1/128",), callback_schedule_s=("600",)):
            await platform.enqueue(refused, allowed)

            async def both_settled() -> Any:
                rows = await platform.rows()
                return (
                    rows[refused.id]["error"]
                    and rows[allowed.id]["state"] == "delivered"
                    and rows[refused.id]
                )

            row = await wait_until(both_settled)
    assert orjson.loads(row["error"]) == {
        "kind": "Forbidden",
        "message": "the target's address is loopback, and PENSTOCK_CALLBACK_ALLOW does not allow it",
        "status": None,
        "excerpt": None,
    }
    assert (row["state"], row["attempt"]) == ("pending", 1)
    assert internal.connections == 1
    log = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert "the target's address is loopback" in log
    assert "hunter2" not in log
    assert SECRET.removeprefix("whsec_") not in log
