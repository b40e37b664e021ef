"""A worker without Kafka: from when it counts its leases, how many it takes, and what it makes of foreign answers."""

import asyncio
import re

import orjson
import pytest
from aiohttp import web
from tests.waiting import wait_until

from penstock import process
from penstock.contracts.context import Context
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.errors import GatewayUnavailable, SettingsError, Unavailable
from penstock.http.tokens import Credentials
from penstock.worker import Done, Worker, WorkerSettings
from penstock.worker.asking import Gateway as RealGateway
from penstock.worker.asking import Refusals
from penstock.worker.hand import Hand, claims_of, key_of
from penstock.worker.heart import Heart as RealHeart
from penstock.worker.heart import wait_room
from penstock.worker.over_http import HttpLink, HttpPuller

READY = ReadyTask(Fence(1, 0, "s", 0), "t", Context.encode(None), 60_000)


class Gateway:
    def __init__(self, body):
        self.body = {"tasks": [READY.to_wire()], **body}
        self.answered = False
        self.asked_s = self.arrived_s = 0.0

    async def post(self, path, body):
        if self.answered:
            await asyncio.Event().wait()
        self.answered = True
        self.asked_s = asyncio.get_running_loop().time()
        # A long poll.
        self.arrived_s = self.asked_s + 10
        return self.body, self.arrived_s


class Heart:
    room = 10

    def __init__(self):
        self.heard_s = asyncio.get_running_loop().create_future()

    def take(self, claimed, heard_s):
        self.heard_s.set_result(heard_s)


@pytest.mark.parametrize(
    ("body", "before_s"),
    [
        pytest.param({"claimed_ms_ago": 1_500}, 1.5, id="since the claim"),
        pytest.param({}, 0.0, id="a gateway that does not say"),
        pytest.param({"claimed_ms_ago": 3_600_000}, 10.0, id="not before it was asked"),
    ],
)
async def test_a_lease_counts_from_its_claim(body, before_s):
    """W6: the platform counts from the claim, so a worker that counts from the answer would stop too late."""
    gateway, heart = Gateway(body), Heart()
    puller = HttpPuller(gateway, "t", Hand(10), heart, "w", lambda _claimed: None, {})
    pulling = asyncio.create_task(puller.run())
    heard_s = await asyncio.wait_for(heart.heard_s, 5)
    pulling.cancel()
    assert heard_s == pytest.approx(gateway.arrived_s - before_s, abs=0.5)


class Impostor:
    """Answers POST with what it is told, one after the other, then with the last for ever; keeps what it was sent."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.refused = 0

        # Keys that are accepted; None asks for none.
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
    """Starts one; the gateway that a worker sees in it."""
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


NOT_OURS = [
    pytest.param(b"<html>Please log in</html>", id="a page"),
    pytest.param(b"", id="nothing"),
    pytest.param(b'{"tasks": [', id="half an answer"),
    pytest.param([], id="a list"),
    pytest.param({}, id="empty"),
    pytest.param({"tasks": None, "rejected": 5}, id="other types"),
    pytest.param({"tasks": [], "claimed_ms_ago": "soon", "rejected": [], "gone": ["x"]}, id="odd details"),
    pytest.param({"rejected": [{"index": 7}], "gone": []}, id="of entries that nobody sent"),
    pytest.param({"rejected": [], "gone": [{"why": "over"}]}, id="of no entry"),
]


@pytest.mark.parametrize("body", NOT_OURS)
async def test_an_answer_that_is_no_gateways_is_a_gateway_that_is_away(impostor, body):
    """A proxy's page with status 200 is told from an answer, says where it came from, and is asked again; a beat of which
    it says nothing is not heard."""
    _, url = await impostor((200, body))
    async with RealGateway(url) as gateway:
        with pytest.raises(
            GatewayUnavailable, match=rf"^no gateway answers at {url}: /hold_task .* 200 with"
        ):
            await gateway.post("/hold_task", {})
        beat = Heartbeat(Kind.BEAT, "w", 60_000, [(1, 0, 0)])
        with pytest.raises(GatewayUnavailable, match=rf"^no gateway answers at {url}: /set_task .* 200 with"):
            await HttpLink(gateway, "w").try_heartbeat(beat)


async def test_a_beat_that_was_answered_by_no_gateway_is_sent_again(impostor):
    """H3: it counts as not heard, and nothing is lost in a task that nobody looks at."""
    found, url = await impostor((200, b"<html>"), (200, {"rejected": [], "gone": []}))
    now_s = 0.0
    async with RealGateway(url) as gateway:
        heart = RealHeart(HttpLink(gateway, "w"), "w", lambda: now_s, lambda _keys: None)
        heart.take(claims_of("w", [READY], {}), 0.0)
        for asked in (1, 2):
            while len(found.asked) < asked:
                now_s += 1
                assert now_s < 10 * 60
                heart.step()
                if sending := list(heart._sending):
                    await asyncio.wait(sending)
                    assert [task.exception() for task in sending] == [None]


async def test_a_worker_lives_through_a_proxy_that_answers_for_its_gateway(impostor):
    """It asks again, and reports again, until a gateway answers; the result is not lost."""
    ours = {"tasks": [READY.to_wire()], "claimed_ms_ago": 0}
    empty = {"tasks": [], "claimed_ms_ago": 0, "accepted": 1, "rejected": [], "gone": []}
    page = (200, b"<html>")
    # Once it has spoken as a gateway, a route that is not there is a proxy's mistake.
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
    await asyncio.wait_for(serving, 30)


@pytest.mark.parametrize("status", [404, 405])
async def test_a_path_at_which_there_never_was_a_gateway_is_a_setting_that_is_wrong(impostor, status):
    """It says which, and the worker ends with the status of a setting that is wrong; its supervisor need not try."""
    _, url = await impostor((status, {"type": "about:blank", "title": "Not Found", "status": status}))
    worker = Worker(WorkerSettings(worker_gateway=f"{url}/elsewhere"))
    worker.stage("t.s")(lambda _task: Done())
    with pytest.raises(SettingsError, match=r"^worker_gateway='.*/elsewhere': no gateway answers") as caught:
        await worker.serve(asyncio.Event())
    assert process.exit_status(caught.value) == 6


EMPTY = {"tasks": [], "claimed_ms_ago": 0, "accepted": 0, "rejected": [], "gone": []}


def worker_of(url, **given):
    worker = Worker(WorkerSettings(worker_gateway=url, **given))
    worker.stage("t.s")(lambda _task: Done())
    return worker


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that is there while a worker is ready; `process` makes it for services that run as a process."""
    found = tmp_path / "ready"
    monkeypatch.setenv("PENSTOCK_READY_FILE", str(found))
    return found


async def test_a_worker_is_ready_once_a_gateway_has_answered_it(impostor, mark):
    """O2: not while none answers, and not while what answers is none; nor does it wait for a task that may never come."""
    found, url = await impostor((503, b"starting"), (200, b"<html>"), (200, EMPTY))
    stopping, readied = asyncio.Event(), []
    serving = asyncio.create_task(worker_of(url).serve(stopping, lambda: readied.append(len(found.asked))))
    await wait_until(lambda: readied)
    assert readied == [3]
    assert [body["wait_s"] for _, body in found.asked[:3]] == [0, 0, 0]
    await wait_until(lambda: len(found.asked) > 3)
    assert found.asked[3][1]["wait_s"] > 0
    stopping.set()
    await asyncio.wait_for(serving, 30)


async def test_a_worker_that_is_refused_takes_the_next_key_from_its_file(impostor, mark, tmp_path, caplog):
    """O5: a key is rotated under a worker without a restart: refused, it is not ready and says what to do, and goes on as soon as
    the file holds a key that is accepted."""
    file = tmp_path / "key"
    file.write_text("pk_old\n")
    found, url = await impostor((200, EMPTY))
    found.keys = {"pk_old"}
    stopping = asyncio.Event()
    serving = asyncio.create_task(worker_of(url, api_key_file=str(file)).serve(stopping, mark.touch))
    await wait_until(mark.exists)
    found.keys = {"pk_new"}
    await wait_until(lambda: not mark.exists())
    await wait_until(lambda: found.refused > 1)
    assert f"put a key with the role worker that is valid for its types into {file}" in caplog.text
    # Written in place, there is a moment without: the worker lives through it.
    file.write_text("")
    empty = rf"does not let this worker in \(no; api_key_file='{file}' is empty\): put"
    await wait_until(lambda: re.search(empty, caplog.text))
    file.unlink()
    await wait_until(lambda: f"(no; api_key_file='{file}' cannot be read: " in caplog.text)
    file.write_text("pk_new")
    await wait_until(mark.exists)
    stopping.set()
    await asyncio.wait_for(serving, 30)


async def test_a_worker_that_stays_refused_ends_and_says_why(impostor, mark):
    """O5: after the stated time, with the status of settings that are wrong; it was never ready."""
    found, url = await impostor((200, EMPTY))
    found.keys = {"pk_other"}
    worker = worker_of(url, api_key="pk_mine", refused_timeout_s=0.5)
    with pytest.raises(SettingsError, match=r"does not let this worker in .*PENSTOCK_API_KEY") as caught:
        await asyncio.wait_for(worker.serve(asyncio.Event(), mark.touch), 30)
    assert process.exit_status(caught.value) == 6
    assert found.refused > 1
    assert not mark.exists()


def test_refusals_count_only_in_a_row():
    """O5: what was refused long ago, and not asked since, leaves all its time to the next."""
    refusals = Refusals(300)
    what = ("/set_task", "")
    assert refusals.note(what, 1_000.0) == 300
    assert refusals.note(what, 1_020.0) == 280
    assert refusals.note(what, 9_000.0) == 300
    assert refusals.accepted(what, 9_005.0, {})
    assert refusals.note(what, 9_010.0) == 300


def test_the_patience_that_is_told_is_the_workers():
    """O5: of several questions the one that has been refused for longest ends the worker, so that is what each refusal tells; one
    that is not asked any more ends nothing."""
    refusals = Refusals(300)
    report, hold = ("/set_task", ""), ("/hold_task", "t")
    assert refusals.note(hold, 1_000.0) == 300
    assert refusals.note(report, 1_014.0) == 286
    assert refusals.note(hold, 1_015.0) == 285
    for now_s in (1_050.0, 1_076.0):
        left_s = refusals.note(report, now_s)
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
def test_what_an_answer_says_of_other_questions(forbidden, asked_s, sent, free):
    """O5: a key that was not known is known by any later answer; one that may not do something still may not."""
    refusals = Refusals(300)
    refusals.note(("/hold_task", "t"), 1_000.0, forbidden)
    assert refusals.accepted(("/set_task", ""), asked_s, sent) is free
    # Of the question itself any later answer does.
    assert refusals.accepted(("/hold_task", "t"), 1_002.0, sent)


async def test_a_full_worker_is_let_in_again_by_its_beats(impostor, tmp_path):
    """O2: it has no room and so asks for nothing; once its beats are answered again it is ready."""
    found, url = await impostor((200, EMPTY))
    told = []
    async with RealGateway(
        url,
        Credentials("pk_mine"),
        patience_s=300,
        let_in=lambda: told.append("in"),
        shut_out=lambda: told.append("out"),
    ) as gateway:
        link = HttpLink(gateway, "w")
        beat = Heartbeat(Kind.BEAT, "w", 60_000, [(1, 0, 0)])
        await gateway.post("/hold_task", {"type": "t"})
        found.keys = {"pk_other"}
        with pytest.raises(Unavailable):
            await gateway.post("/hold_task", {"type": "t"})
        with pytest.raises(Unavailable):
            await link.try_heartbeat(beat)
        assert told == ["in", "out"]
        found.keys = {"pk_mine"}
        await link.try_heartbeat(beat)
        assert told == ["in", "out", "in"]


async def test_what_was_not_asked_is_not_answered(impostor, monkeypatch):
    """O2: a worker that was refused and has no room since asks its next question for an answer at once, not for a long poll."""
    found, url = await impostor((200, EMPTY))
    found.keys = {"pk_other"}
    hand = Hand(1)
    async with RealGateway(url, Credentials("pk_mine"), patience_s=300) as gateway:
        heart = RealHeart(HttpLink(gateway, "w"), "w", lambda: 0.0, lambda _keys: None)
        puller = HttpPuller(gateway, "t", hand, heart, "w", lambda _claimed: None, {})
        monkeypatch.setattr("penstock.worker.over_http.WAIT_S", 0.01)
        waits = []

        async def no_room(*arguments):
            waits.append(await wait_room(*arguments))
            return waits[-1]

        monkeypatch.setattr("penstock.worker.over_http.wait_room", no_room)
        pulling = asyncio.create_task(puller.run())
        await wait_until(lambda: found.refused)
        hand.take([READY])
        found.keys = None
        await wait_until(lambda: waits[-2:] == [False, False])
        assert found.asked == []
        hand.let_go([key_of(READY)])
        await wait_until(lambda: len(found.asked) > 1)
        pulling.cancel()
    assert [body["wait_s"] for _, body in found.asked[:2]] == [0, 0.01]


def test_a_file_with_a_key_is_told_from_one_without(tmp_path):
    """O5: what cannot be read or sent is refused at the start, by the name of the file and without what is in it; two keys are one
    too many."""
    file = tmp_path / "key"
    for content, told in ((None, "cannot be read"), ("\n", "is empty"), ("sec ret", "holds no API key")):
        if content is not None:
            file.write_text(content)
        with pytest.raises(SettingsError, match=rf"api_key_file='{file}' {told}") as caught:
            Credentials(file=str(file))
        assert "sec ret" not in str(caught.value)
    with pytest.raises(SettingsError, match="both set"):
        Credentials("pk_a", str(file))
    file.write_text("pk_a")
    found = Credentials.from_environment({"PENSTOCK_API_KEY_FILE": str(file)})
    assert found.headers == {"Authorization": "Bearer pk_a"}
    assert not found.renewed(found.headers)
    # Two requests were under way with the old one: both are to be asked again.
    sent = found.headers
    file.write_text("pk_b")
    assert found.renewed(sent)
    assert found.renewed(sent)
