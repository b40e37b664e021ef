"""The HTTP transport of a worker: start of leases, number of tasks, and answers that are not a
gateway's."""

import asyncio
import re
from contextlib import asynccontextmanager

import orjson
import pytest
from aiohttp import web
from tests.support.waiting import in_time, wait_until

from penstock import process
from penstock.contracts.context import Context
from penstock.contracts.heartbeat import Heartbeat, Kind, claims_of
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome
from penstock.errors import GatewayUnavailable, SettingsError, Throttled, TooLarge, Unavailable
from penstock.http.credentials import Credentials
from penstock.worker import Done, Worker, WorkerSettings
from penstock.worker.gateway_client import WAIT_S, Refusals
from penstock.worker.gateway_client import GatewayClient as RealGateway
from penstock.worker.heartbeat_sender import HeartbeatSender as RealHeartbeatSender
from penstock.worker.http_transport import HttpPuller, HttpTransport
from penstock.worker.in_flight import InFlight

READY = ReadyTask(Fence(1, 0, "s", 0), "t", Context.encode(None), 60_000)


class GatewayClient:
    def __init__(self, body):
        self.body = {"tasks": [READY.to_wire()], **body}
        self.answered = False
        self.asked_s = self.arrived_s = 0.0

    async def post(self, path, body, headers=None):
        if self.answered:
            await asyncio.Event().wait()
        self.answered = True
        self.asked_s = asyncio.get_running_loop().time()
        # A long poll.
        self.arrived_s = self.asked_s + 10
        return self.body, self.arrived_s


class HeartbeatSender:
    room = 10

    def __init__(self):
        self.claimed_s = asyncio.get_running_loop().create_future()

    def add(self, claimed, claimed_s):
        self.claimed_s.set_result(claimed_s)


@pytest.mark.parametrize(
    ("body", "before_s"),
    [
        pytest.param({"claimed_ms_ago": 1_500}, 1.5, id="since the claim"),
        pytest.param({}, 0.0, id="without claimed_ms_ago"),
        pytest.param({"claimed_ms_ago": 3_600_000}, 10.0, id="not before the request"),
    ],
)
async def test_a_lease_counts_from_its_claim(body, before_s):
    """W6: the platform counts from the claim, so a worker that counts from the answer would stop
    too late."""
    gateway, heartbeats = GatewayClient(body), HeartbeatSender()
    puller = HttpPuller(gateway, "t", InFlight(10), heartbeats, "w", lambda _claimed: None, {})
    pulling = asyncio.create_task(puller.run())
    claimed_s = await in_time(heartbeats.claimed_s)
    pulling.cancel()
    assert claimed_s == pytest.approx(gateway.arrived_s - before_s, abs=0.5)


class Impostor:
    """Answers POST with the given answers in order, repeats the last one, and records requests."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.refused = 0

        # The accepted API keys; None accepts requests without a key.
        self.keys = None

    async def answer(self, request):
        if self.keys is not None and request.headers.get("Authorization", "")[7:] not in self.keys:
            self.refused += 1
            return web.json_response(
                {"type": "urn:penstock:problem:unauthenticated", "detail": "no"}, status=401
            )
        self.asked.append((request.path, orjson.loads(await request.read())))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        return web.Response(status=status, body=data, content_type="text/html")


@pytest.fixture
async def impostor():
    """Starts impostors; returns each with its URL."""
    runners = []

    async def start(*answers):
        found = Impostor(*answers)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", found.answer)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        return found, f"http://127.0.0.1:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_a_gateway_that_knows_no_description_gets_none(impostor):
    """W1: a gateway of 0.1.0 refuses fields that it does not know; the worker goes on without."""
    refusal = orjson.dumps({"type": "urn:penstock:problem:invalid", "detail": "unknown field"})
    found, url = await impostor((422, refusal), (200, b'{"tasks": []}'))
    about = {"host": "h", "version": "1", "stages": ["start"]}
    async with RealGateway(url) as gateway:
        puller = HttpPuller(
            gateway, "t", InFlight(10), HeartbeatSender(), "w", lambda _claimed: None, {}, 0.0, about
        )
        pulling = asyncio.create_task(puller.run())
        await wait_until(lambda: len(found.asked) >= 2)
        pulling.cancel()
    first, second = [body for _path, body in found.asked[:2]]
    assert about.items() <= first.items()
    assert about.keys().isdisjoint(second)


FOREIGN_BODIES = [
    pytest.param(b"<html>Please log in</html>", id="a page"),
    pytest.param(b"", id="empty body"),
    pytest.param(b'{"tasks": [', id="half an answer"),
    pytest.param([], id="a list"),
    pytest.param({}, id="empty"),
    pytest.param({"tasks": None, "rejected": 5}, id="other types"),
    pytest.param({"tasks": [], "claimed_ms_ago": "soon", "rejected": [], "gone": ["x"]}, id="odd details"),
    pytest.param({"rejected": [{"index": 7}], "gone": []}, id="entries that were not sent"),
    pytest.param({"rejected": [], "gone": [{"why": "over"}]}, id="no entry"),
]


@pytest.mark.parametrize("body", FOREIGN_BODIES)
async def test_a_foreign_answer_counts_as_an_unavailable_gateway(impostor, body):
    """The worker detects a proxy's page with status 200, reports its URL, and retries. A beat
    without an answer is not confirmed."""
    _, url = await impostor((200, body))
    async with RealGateway(url) as gateway:
        with pytest.raises(
            GatewayUnavailable, match=rf"^no gateway answers at {url}: /hold_task .* 200 with"
        ):
            await gateway.post("/hold_task", {})
        beat = Heartbeat(Kind.BEAT, "w", 60_000, [AttemptId(1, 0, 0)])
        with pytest.raises(GatewayUnavailable, match=rf"^no gateway answers at {url}: /set_task .* 200 with"):
            await HttpTransport(gateway, "w").try_heartbeat(beat)


async def test_a_beat_with_a_foreign_answer_is_sent_again(impostor):
    """H3: the beat counts as not confirmed, and no exception is lost in a background task."""
    found, url = await impostor((200, b"<html>"), (200, {"rejected": [], "gone": []}))
    now_s = 0.0
    async with RealGateway(url) as gateway:
        heartbeats = RealHeartbeatSender(HttpTransport(gateway, "w"), "w", lambda: now_s, lambda _keys: None)
        heartbeats.add(claims_of("w", [READY], {}), 0.0)
        for asked in (1, 2):
            while len(found.asked) < asked:
                now_s += 1
                assert now_s < 10 * 60
                heartbeats.step()
                if sending := list(heartbeats._sending):
                    await asyncio.wait(sending)
                    assert [task.exception() for task in sending] == [None]


async def test_a_worker_survives_foreign_answers(impostor):
    """The worker repeats requests and reports until a gateway answers, and loses no result."""
    ours = {"tasks": [READY.to_wire()], "claimed_ms_ago": 0}
    empty = {"tasks": [], "claimed_ms_ago": 0, "rejected": [], "gone": []}
    page = (200, b"<html>")
    # After an answer of a gateway, a missing route is a fault of a proxy.
    found, url = await impostor(page, (200, ours), page, (404, b"no route"), page, (200, empty))
    worker = Worker(WorkerSettings(worker_gateway=url, pool=1, backlog=0))
    ran = []

    @worker.stage("t.s")
    async def handler(task):
        ran.append(task.id)
        return Done({"n": task.id})

    stopping = asyncio.Event()
    serving = asyncio.create_task(worker.serve(stopping))

    def reported():
        return [body for path, body in found.asked if path == "/set_task" and len(found.answers) == 1]

    await wait_until(reported)
    assert reported()[-1]["results"][0]["id"] == 1
    assert ran == [1]
    stopping.set()
    await in_time(serving)


@pytest.mark.parametrize("status", [404, 405])
async def test_a_url_without_a_gateway_is_a_wrong_setting(impostor, status):
    """The error names the setting, and the worker ends with the status of wrong settings."""
    _, url = await impostor((status, {"type": "about:blank", "title": "Not Found", "status": status}))
    worker = Worker(WorkerSettings(worker_gateway=f"{url}/elsewhere"))
    worker.stage("t.s")(lambda _task: Done())
    with pytest.raises(
        SettingsError, match=r"^PENSTOCK_WORKER_GATEWAY='.*/elsewhere': no gateway answers"
    ) as caught:
        await worker.serve(asyncio.Event())
    assert process.exit_status(caught.value) == 6


EMPTY = {"tasks": [], "claimed_ms_ago": 0, "rejected": [], "gone": []}


def worker_of(url, **given):
    worker = Worker(WorkerSettings(worker_gateway=url, **given))
    worker.stage("t.s")(lambda _task: Done())
    return worker


@pytest.fixture
def ready_file(tmp_path, monkeypatch):
    """The file that exists while a worker is ready."""
    found = tmp_path / "ready"
    monkeypatch.setenv("PENSTOCK_READY_FILE", str(found))
    return found


async def test_a_worker_is_ready_after_an_answer_of_a_gateway(impostor, ready_file):
    """O2: a worker is ready after the first answer of a gateway, also without a task. Foreign
    answers do not count."""
    found, url = await impostor((503, b"starting"), (200, b"<html>"), (200, EMPTY))
    stopping, readied = asyncio.Event(), []
    serving = asyncio.create_task(worker_of(url).serve(stopping, lambda: readied.append(len(found.asked))))
    await wait_until(lambda: readied)
    assert readied == [3]
    assert [body["wait_s"] for _, body in found.asked[:3]] == [0, 0, 0]
    await wait_until(lambda: len(found.asked) > 3)
    assert found.asked[3][1]["wait_s"] > 0
    stopping.set()
    await in_time(serving)


async def test_a_refused_worker_reads_the_next_key_from_its_file(impostor, ready_file, tmp_path, caplog):
    """O5: an API key is rotated without a restart of the worker. While it is refused, it is not
    ready and logs the remedy. It continues as soon as the file has an accepted key."""
    file = tmp_path / "key"
    file.write_text("pk_old\n")
    found, url = await impostor((200, EMPTY))
    found.keys = {"pk_old"}
    stopping = asyncio.Event()
    serving = asyncio.create_task(worker_of(url, api_key_file=str(file)).serve(stopping, ready_file.touch))
    await wait_until(ready_file.exists)
    found.keys = {"pk_new"}
    await wait_until(lambda: not ready_file.exists())
    await wait_until(lambda: found.refused > 1)

    def logged() -> str:
        return "\n".join(str(getattr(record, "error", "")) for record in caplog.records)

    assert f"put a key with the role worker that is valid for its types into {file}" in logged()
    # A file written in place is empty for a moment, which the worker tolerates.
    file.write_text("")
    empty = rf"refuses this worker \(no; PENSTOCK_API_KEY_FILE='{file}' is empty\): put"
    await wait_until(lambda: re.search(empty, logged()))
    file.unlink()
    await wait_until(lambda: f"(no; PENSTOCK_API_KEY_FILE='{file}' cannot be read: " in logged())
    file.write_text("pk_new")
    await wait_until(ready_file.exists)
    stopping.set()
    await in_time(serving)


async def test_a_worker_that_stays_refused_ends_with_the_reason(impostor, ready_file):
    """O5: the worker ends after its timeout with the status of wrong settings, and was never
    ready."""
    found, url = await impostor((200, EMPTY))
    found.keys = {"pk_other"}
    worker = worker_of(url, api_key="pk_mine", refused_timeout_s=0.5)
    with pytest.raises(SettingsError, match=r"refuses this worker .*PENSTOCK_API_KEY") as caught:
        await in_time(worker.serve(asyncio.Event(), ready_file.touch))
    assert process.exit_status(caught.value) == 6
    assert found.refused > 1
    assert not ready_file.exists()


def test_only_consecutive_refusals_count():
    """O5: an old refusal without later requests does not shorten the timeout of the next one."""
    refusals = Refusals(300)
    what = ("/set_task", "")
    assert refusals.add(what, 1_000.0) == 300
    assert refusals.add(what, 1_020.0) == 280
    assert refusals.add(what, 9_000.0) == 300
    assert refusals.on_accepted(what, 9_005.0, {})
    assert refusals.add(what, 9_010.0) == 300


def test_the_oldest_refusal_determines_the_time_left():
    """O5: the operation that has been refused for longest ends the worker, so each refusal reports
    its time. Operations without further requests do not count."""
    refusals = Refusals(300)
    report, hold = ("/set_task", ""), ("/hold_task", "t")
    assert refusals.add(hold, 1_000.0) == 300
    assert refusals.add(report, 1_014.0) == 286
    assert refusals.add(hold, 1_015.0) == 285
    for now_s in (1_050.0, 1_076.0):
        left_s = refusals.add(report, now_s)
    assert left_s == 300 - 62


KEY, OTHER = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}


@pytest.mark.parametrize(
    ("forbidden", "asked_s", "sent", "free"),
    [
        pytest.param(None, 1_001.0, KEY, True, id="known now"),
        pytest.param(KEY, 1_001.0, KEY, False, id="may do this and not that"),
        pytest.param(OTHER, 1_001.0, KEY, True, id="another key might"),
        pytest.param(None, 999.0, KEY, False, id="asked before the refusal"),
        pytest.param(KEY, 1_061.0, KEY, True, id="not asked for long"),
    ],
)
def test_an_answer_clears_refusals_of_the_same_kind(forbidden, asked_s, sent, free):
    """O5: any later answer clears refusals of an unknown key, but not refusals of a missing
    permission."""
    refusals = Refusals(300)
    refusals.add(("/hold_task", "t"), 1_000.0, forbidden)
    assert refusals.on_accepted(("/set_task", ""), asked_s, sent) is free
    # Any later answer to the same operation clears its refusal.
    assert refusals.on_accepted(("/hold_task", "t"), 1_002.0, sent)


async def test_accepted_beats_make_a_full_worker_ready(impostor, tmp_path):
    """O2: a full worker requests no tasks; it is ready again once its beats are answered."""
    found, url = await impostor((200, EMPTY))
    readiness_changes = []
    async with RealGateway(
        url,
        Credentials("pk_mine"),
        patience_s=300,
        on_accepted=lambda: readiness_changes.append("in"),
        on_refused=lambda: readiness_changes.append("out"),
    ) as gateway:
        link = HttpTransport(gateway, "w")
        beat = Heartbeat(Kind.BEAT, "w", 60_000, [AttemptId(1, 0, 0)])
        await gateway.post("/hold_task", {"type": "t"})
        found.keys = {"pk_other"}
        with pytest.raises(Unavailable):
            await gateway.post("/hold_task", {"type": "t"})
        with pytest.raises(Unavailable):
            await link.try_heartbeat(beat)
        assert readiness_changes == ["in", "out"]
        found.keys = {"pk_mine"}
        await link.try_heartbeat(beat)
        assert readiness_changes == ["in", "out", "in"]


async def test_a_full_worker_does_not_start_a_long_poll(impostor, monkeypatch):
    """O2: the next request of a worker that was refused, and had no room since, asks for an answer
    at once."""
    found, url = await impostor((200, EMPTY))
    found.keys = {"pk_other"}
    in_flight = InFlight(1)
    async with RealGateway(url, Credentials("pk_mine"), patience_s=300) as gateway:
        heartbeats = RealHeartbeatSender(HttpTransport(gateway, "w"), "w", lambda: 0.0, lambda _keys: None)
        puller = HttpPuller(gateway, "t", in_flight, heartbeats, "w", lambda _claimed: None, {}, 0.01)
        sizes = []
        reserve = in_flight.reserve

        @asynccontextmanager
        async def reserve_and_note(*arguments):
            async with reserve(*arguments) as reservation:
                sizes.append(reservation.size)
                yield reservation

        monkeypatch.setattr(in_flight, "reserve", reserve_and_note)
        pulling = asyncio.create_task(puller.run())
        await wait_until(lambda: found.refused)
        in_flight.add([READY])
        found.keys = None
        await wait_until(lambda: sizes[-2:] == [0, 0])
        assert found.asked == []
        in_flight.remove([READY.fence.attempt_id])
        await wait_until(lambda: len(found.asked) > 1)
        pulling.cancel()
    assert [body["wait_s"] for _, body in found.asked[:2]] == [0, 0.01]


@pytest.mark.parametrize(
    ("error", "wait_s"),
    [
        pytest.param(Throttled("too much at once", retry_after_s=0.0), WAIT_S, id="429"),
        pytest.param(GatewayUnavailable("connection refused"), 0.0, id="no gateway"),
    ],
)
async def test_a_throttled_worker_keeps_its_long_poll(error, wait_s):
    """O2, T6: a 429 shows that the gateway is available, and requests without a wait would load it
    more. After a failure the next request is answered at once."""
    waits = []
    asked = asyncio.Event()

    class Gateway:
        async def post(self, _path, body, _headers=None):
            waits.append(body["wait_s"])
            if len(waits) == 2:
                raise error
            if len(waits) == 3:
                asked.set()
                await asyncio.Event().wait()
            return EMPTY, 0.0

    puller = HttpPuller(Gateway(), "t", InFlight(10), HeartbeatSender(), "w", lambda _claimed: None, {})
    pulling = asyncio.create_task(puller.run())
    await asked.wait()
    pulling.cancel()
    assert waits == [0.0, WAIT_S, wait_s]


def test_an_invalid_key_file_is_refused(tmp_path):
    """O5: a file that is unreadable, or has several or invalid keys, is refused at the start. The
    error has its name, not its content."""
    file = tmp_path / "key"
    for content, readiness_changes in (
        (None, "cannot be read"),
        ("\n", "is empty"),
        ("sec ret", "holds no API key"),
    ):
        if content is not None:
            file.write_text(content)
        with pytest.raises(
            SettingsError, match=rf"PENSTOCK_API_KEY_FILE='{file}' {readiness_changes}"
        ) as caught:
            Credentials(file=str(file))
        assert "sec ret" not in str(caught.value)
    with pytest.raises(SettingsError, match="both set"):
        Credentials("pk_a", str(file))
    file.write_text("pk_a")
    found = Credentials.from_environment({"PENSTOCK_API_KEY_FILE": str(file)})
    assert found.headers == {"Authorization": "Bearer pk_a"}
    assert not found.refreshed(found.headers)
    # Two requests were in flight with the old key: both must be repeated.
    sent = found.headers
    file.write_text("pk_b")
    assert found.refreshed(sent)
    assert found.refreshed(sent)


class StrictGateway:
    """Refuses each request with an entry that names stage `bad`, as a gateway refuses a body that
    is too large."""

    def __init__(self) -> None:
        self.accepted: list[dict] = []

    async def post(self, _path, body, _headers=None):
        entries = body["results"]
        if any(entry["stage"] == "bad" and entry["outcome"] != "fail" for entry in entries):
            raise TooLarge("the body is too large")
        rejected = [
            {"index": index, "errors": [{"pointer": "", "detail": "no"}]}
            for index, entry in enumerate(entries)
            if entry["stage"] == "odd" and entry["outcome"] != "fail"
        ]
        refused = {each["index"] for each in rejected}
        self.accepted += [entry for index, entry in enumerate(entries) if index not in refused]
        return {"rejected": rejected, "gone": []}, 0.0


async def test_a_refused_result_costs_its_own_attempt_only():
    """T6: when a gateway refuses a request or an entry, the other results arrive, and the attempt
    at fault ends with the reason instead of waiting for its lease."""
    gateway = StrictGateway()
    stages = ["s", "bad", "s", "odd", "s", "s"]
    results = [
        StageResult(fence=Fence(number, 0, stage, 0), outcome=Outcome.DONE, context=Context.encode(number))
        for number, stage in enumerate(stages, 1)
    ]
    await HttpTransport(gateway, "w").send_results(results)
    found = {entry["id"]: entry for entry in gateway.accepted}
    assert {number: str(entry["outcome"]) for number, entry in found.items()} == {
        1: "done",
        2: "fail",
        3: "done",
        4: "fail",
        5: "done",
        6: "done",
    }
    assert found[2]["permanent"]
    assert "the body is too large" in found[2]["error"]["message"]
    assert found[4]["error"]["kind"] == "Refused"
