"""Topics of the live stream, and what waits to be told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.live_topics import INTERVALS_S, MOST_TOPICS, Pending, ids_of, interval_s, parse_topics

TOPICS = st.lists(st.sampled_from(["tasks", "task:1", "task:2", "flow:7", "overview"]))


def test_topics_of_a_request():
    found = parse_topics("tasks,task:17,flow:3,task:17,")
    assert found == {"tasks", "task:17", "flow:3"}
    assert (ids_of("task", found), ids_of("flow", found)) == ([17], [3])
    assert interval_s("task:17") == INTERVALS_S["task"]


@pytest.mark.parametrize(
    "text", ["", ",", "task", "task:", "task:0", "task:x", "nothing", "task:9223372036854775808", "Tasks"]
)
def test_what_is_no_topic_is_named(text):
    with pytest.raises(ValueError, match="topic"):
        parse_topics(text)


def test_a_stream_has_a_bounded_number_of_topics():
    names = [f"task:{number}" for number in range(1, MOST_TOPICS + 2)]
    with pytest.raises(ValueError, match="1 to 100"):
        parse_topics(",".join(names))
    assert len(parse_topics(",".join(names[:-1]))) == MOST_TOPICS


@given(st.lists(st.one_of(TOPICS, st.just("resync"), st.just("take"))))
def test_each_change_is_told_once_and_none_is_lost(steps):
    """A model: the set of topics that have changed since they were told."""
    pending, changed, everything = Pending(), set(), False
    for step in steps:
        if step == "resync":
            pending.resync()
            everything = True
        elif step == "take":
            told = pending.take()
            assert told is None if everything else (sorted(told) == sorted(changed))
            changed, everything = set(), False
        else:
            pending.add(step)
            changed |= set(step)
        assert bool(pending) == (everything or bool(changed))
