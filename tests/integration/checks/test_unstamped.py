"""Topics whose records their writers stamp: the check finds them, and the repair changes them."""

from tests.support.services import make_topics
from tests.support.topics import use_writers_stamps

from penstock.checks.app import check
from penstock.checks.report import Rule
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.settings import Platform


async def test_topics_with_the_stamps_of_their_writers_are_found_and_changed(kafka_servers, prefix, database):
    """O2b, design's guarantee 6: a topic of an older version is an offender, a ready topic too. The
    repair lets the broker stamp its records, and the check is clean."""
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 2)])
    settings = Platform(kafka=kafka_servers, prefix=prefix, postgres=database)
    assert (await check(settings)).clean
    old = [f"{prefix}submitted", f"{prefix}ready.t"]
    await use_writers_stamps(settings, old)
    report = await check(settings)
    assert report.counts == {Rule.UNSTAMPED: 2}
    assert {offender.id for offender in report.offenders} == set(old)
    assert "a wrong clock" in report.offenders[0].lacks
    report = await check(settings, repair=True)
    assert report.repaired == {Rule.UNSTAMPED: 2}
    assert report.well
    assert (await check(settings)).clean
