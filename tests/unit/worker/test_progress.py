"""Progress: what a handler may report, how often it is sent, and that it counts as a heartbeat."""

import asyncio
import sys

import pytest
from tests.unit.worker.test_heartbeat_sender import Rig, task

from penstock.contracts.progress import MAX_MESSAGE, REPORTS_PER_RECORD, Progress, headers_of
from penstock.core.attempt import AttemptId
from penstock.core.heartbeat_queue import Answer
from penstock.worker import Task
from penstock.worker.progress import ProgressReporter, one_line

ONE, TWO = AttemptId(1, 0, 0), AttemptId(2, 0, 0)


def reported(*given, **named):
    """The report that a call of `Task.progress` makes."""
    found = {}
    Task(1, "t", "s", 0, 0, 0, None, _report=found.__setitem__).progress(*given, **named)
    return found[ONE]


def test_a_report_has_a_fraction_a_message_or_both():
    """W1: progress is a fraction, words, or both."""
    assert reported(0.4, "frame 1,200 of 3,000") == Progress(0.4, "frame 1,200 of 3,000")
    assert reported(1) == Progress(1.0, "")
    assert reported(message="reading the index") == Progress(None, "reading the index")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ((1.5,), ValueError, r"progress\(fraction=1.5\): a fraction is from 0 to 1, so 40 % is 0.4"),
        ((-0.1,), ValueError, "from 0 to 1"),
        ((float("nan"),), ValueError, "from 0 to 1"),
        ((float("inf"),), ValueError, "from 0 to 1"),
        (("0.4",), TypeError, "is a number from 0 to 1 or None, not str"),
        ((True,), TypeError, "not bool"),
        ((0.4, 7), TypeError, r"progress\(message=…\) is text, not int"),
        ((), TypeError, "needs a fraction, a message or both"),
    ],
)
def test_a_wrong_argument_is_named(given, error, words):
    """W1: the error says which argument is wrong, and what it should be."""
    with pytest.raises(error, match=words):
        reported(*given)


def test_a_message_is_one_line_that_every_store_and_terminal_accepts():
    """The text of a message depends on data, so no text fails the attempt."""
    assert one_line("a\nb\tc\0d\x1b[31m") == "a b c d [31m"
    assert one_line("lone \ud800 surrogate").encode()
    assert one_line("Größe 日本") == "Größe 日本"
    assert len(one_line("x" * 5_000)) == MAX_MESSAGE
    assert one_line("x" * 5_000)[-1] == "…"


def test_a_task_that_no_worker_runs_takes_reports():
    """A unit test of a handler may construct its task."""
    Task(1, "t", "s", 0, 0, 0, None).progress(0.5)


class Sender:
    """A platform that takes the reports of claimed attempts."""

    def __init__(self):
        self.sent = []
        self.again = {}
        self.claimed = {ONE}
        self.in_flight = {ONE, TWO}
        self.reporter = ProgressReporter(
            asyncio.get_running_loop(),
            self.send,
            lambda attempt_id: attempt_id in self.claimed,
            lambda attempt_id: attempt_id in self.in_flight,
        )

    async def send(self, reports):
        self.sent.append(dict(reports))
        return self.again


async def test_only_the_last_report_of_an_attempt_is_sent():
    """The SDK throttles: a handler may report each of its items."""
    sender = Sender()
    for number in range(10_001):
        sender.reporter.report(ONE, Progress(number / 10_000))
    assert await sender.reporter.round()
    assert sender.sent == [{ONE: Progress(1.0)}]
    assert not await sender.reporter.round()


async def test_a_report_waits_for_the_claim_and_not_for_an_attempt_that_is_over():
    """A report must not cost a short handler a claim, and has no effect after the end."""
    sender = Sender()
    sender.reporter.report(TWO, Progress(0.1))
    assert not await sender.reporter.round()
    sender.claimed.add(TWO)
    sender.reporter.report(TWO, Progress(0.2))
    assert await sender.reporter.round()
    sender.reporter.report(TWO, Progress(0.3))
    sender.in_flight.clear()
    assert not await sender.reporter.round()
    assert sender.sent == [{TWO: Progress(0.2)}]


async def test_a_report_that_did_not_arrive_is_sent_again_unless_there_is_a_newer_one():
    """A server that is away for a moment costs no report."""
    sender = Sender()
    sender.claimed.add(TWO)
    sender.again = {ONE: Progress(0.1), TWO: Progress(0.1)}
    sender.reporter.report(ONE, Progress(0.1))
    sender.reporter.report(TWO, Progress(0.1))
    await sender.reporter.round()
    sender.reporter.report(TWO, Progress(0.7))
    sender.again = {}
    await sender.reporter.round()
    assert sender.sent[-1] == {ONE: Progress(0.1), TWO: Progress(0.7)}


async def test_a_report_counts_as_the_heartbeat_of_its_attempt():
    """H5: an attempt that reports gets no further heartbeat until it is silent for half a cycle."""
    rig = Rig()
    rig.add([task(1), task(2)], 0)
    for now_s in range(0, 300, 10):
        await rig.advance(now_s)
        await rig.sender.report({ONE: Progress(now_s / 300)})
    alone = [sent for _lease_ms, sent in rig.transport.sent]
    # Reports are records of one attempt. Heartbeats of the other one never include it.
    assert [TWO] in alone
    assert all(sent in ([ONE], [TWO]) for sent in alone)
    assert len([sent for sent in alone if sent == [ONE]]) == 30
    assert rig.lost == []


@pytest.mark.parametrize("answer", [Answer.UNKNOWN, Answer.THROTTLED])
async def test_a_refused_report_leaves_the_heartbeats_as_they_are(answer):
    """A worker whose report is refused keeps its leases."""
    rig = Rig()
    rig.add([task(1)], 0)
    rig.transport.answers[ONE] = answer
    assert await rig.sender.report({ONE: Progress(0.1)}) == {}
    rig.transport.answers.clear()
    await rig.advance(61)
    assert rig.transport.sent[-1] == (300_000, [ONE])
    assert len(rig.transport.sent) == 2


async def test_a_report_of_an_attempt_that_is_gone_stops_it():
    """W5: the answer to a report revokes as the answer to a heartbeat does."""
    rig = Rig()
    rig.add([task(1)], 0)
    rig.transport.answers[ONE] = Answer.GONE
    await rig.sender.report({ONE: Progress(0.1)})
    assert rig.lost == [ONE]


async def test_an_unavailable_platform_returns_the_reports():
    """The reporter sends them at a later round."""
    rig = Rig()
    rig.add([task(1)], 0)
    rig.transport.unavailable = True
    assert await rig.sender.report({ONE: Progress(0.1)}) == {ONE: Progress(0.1)}
    rig.transport.unavailable, rig.transport.throttled_s = False, 1.0
    assert await rig.sender.report({ONE: Progress(0.1)}) == {ONE: Progress(0.1)}


def test_the_records_of_many_reports_fit_the_broker():
    """No message can make a record of reports larger than Kafka takes."""
    widest = Progress(0.123456789012345, "\U0001f600" * MAX_MESSAGE)
    [(_name, value)] = headers_of(
        {
            AttemptId(sys.maxsize - number, 2**31 - 2, 2**31 - 2): widest
            for number in range(REPORTS_PER_RECORD)
        }
    )
    assert len(value) < 600_000
