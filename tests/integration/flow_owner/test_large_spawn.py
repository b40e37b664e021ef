"""F6 at its size: a stage with 100,000 children."""

from __future__ import annotations

import time
from statistics import median

import psutil
import pytest
from tests.integration.flow_owner.support import Owner

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.completion import Fence, Outcome, conclude
from penstock.postgres import advance, tasks
from penstock.postgres.ending import Ending

pytestmark = pytest.mark.long

CHILDREN = 100_000
# Growth of this process, which holds the values of the children and of their results.
MOST_MIB = 128


async def test_a_stage_with_100_000_children_is_woken_once(pool):
    """F6: children are opened and ended in chunks of 2,000, so that neither a transaction nor
    memory grows with those before it. The last end wakes the task, and each earlier one does not.
    """
    store = Owner(pool)
    [made] = await tasks.submit(pool, [Submission(type="a", context=Context.encode(None))])
    await pool.execute("UPDATE task SET state = 'running', worker = 'w' WHERE id = $1", made.id)
    await pool.execute(
        """
        CREATE TABLE woken (at timestamptz);
        CREATE FUNCTION note_woken() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN INSERT INTO woken VALUES (clock_timestamp()); RETURN NULL; END';
        CREATE TRIGGER note_woken AFTER UPDATE ON task FOR EACH ROW
            WHEN (OLD.state = 'waiting' AND NEW.state <> 'waiting') EXECUTE FUNCTION note_woken();
        """
    )
    row = await pool.fetchrow("SELECT * FROM task WHERE id = $1", made.id)
    fence = Fence(made.id, row["step"], row["stage"], row["attempt"])
    children = Context.encode({"children": [{"type": "b", "context": n} for n in range(CHILDREN)]})
    ending = Ending(
        fence=fence,
        outcome=Outcome.SPAWN,
        conclusion=conclude(fence, Outcome.SPAWN),
        worker="w",
        context=children,
        next_stage="joined",
        terms={"parallel": CHILDREN},
    )
    await advance.advance(pool, [ending])
    took, rss = [], []
    process = psutil.Process()

    async def advance_all():
        while True:
            begun = time.perf_counter()
            if not await store.advance_once():
                return
            took.append(time.perf_counter() - begun)
            rss.append(process.memory_info().rss / 2**20)

    await advance_all()
    assert await pool.fetchval("SELECT count(*) FROM task WHERE type = 'b'") == CHILDREN
    opened = len(took)
    for left in range(CHILDREN, 0, -10_000):
        assert await pool.fetchval("SELECT count(*) FROM woken") == 0, left
        await pool.execute(
            """UPDATE task SET state = 'succeeded', finished_at = now(), result_type = 'json', result = '1'
               WHERE id IN (SELECT id FROM task WHERE type = 'b' AND state = 'ready' ORDER BY id DESC LIMIT 10000)"""
        )
        await advance_all()
    *ends, wake = took[opened:-1]
    early, late = median(took[1:16]), median(took[opened - 16 : opened - 1])
    print(
        f"median ms of a transaction: opens {early * 1000:.0f} at first and {late * 1000:.0f} at last, "
        f"ends {median(ends) * 1000:.0f}, the one that wakes {max(wake, took[-1]) * 1000:.0f}; MiB {rss[0]:.0f} to {max(rss):.0f}"
    )
    # A ratio: neighbours slow both down.
    assert late <= 3 * early
    assert max(rss) - rss[0] <= MOST_MIB
    assert await pool.fetchval("SELECT count(*) FROM woken") == 1
    woken = await pool.fetchrow("SELECT * FROM task WHERE id = $1", made.id)
    assert (woken["state"], woken["stage"], woken["step"]) == ("ready", "joined", 1)
