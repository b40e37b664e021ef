"""History on the real PostgreSQL with archives in a folder: moving tasks, archiving days, and
dropping them."""

import asyncio
import contextlib
import dataclasses
import gzip
from datetime import UTC, datetime, timedelta

import asyncpg
import orjson
import pytest
from tests.integration.task_sync.test_concurrency_keys import index_entries, plan
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.event import OutboxEntry
from penstock.contracts.submission import Submission
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.history import day_of
from penstock.errors import Conflict, NotFound, ObjectsUnavailable, PostgresUnavailable, SessionLost
from penstock.objects import ObjectStore
from penstock.postgres import advance, documents, history, tasks
from penstock.postgres.connection import connect
from penstock.postgres.queries import bound, query
from penstock.postgres.session import open_session
from penstock.postgres.types import TaskType
from penstock.task_sync import history as history_service
from penstock.task_sync.history import History, dry_run
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = (TaskType(name="t", partitions=1),)

KEEP_DAYS = 7.0
RETAIN_DAYS = 30.0
# Columns of `task` that history omits, and columns that history adds.
LIVE_COLUMNS = {
    *("lease_partition", "lease_ms", "max_attempts", "pausing", "tracked", "due_at", "traceparent"),
    *("flow_root_id", "flow_priority", "queued_at", "started_at"),
}
ADDED_COLUMNS = {"attempts", "callbacks_owed", "moved_at"}


@pytest.fixture
def settings(database, tmp_path):
    return TaskSyncSettings(
        postgres=database,
        objects=f"file://{tmp_path}/objects",
        history_keep_days=KEEP_DAYS,
        history_retain_days=RETAIN_DAYS,
        history_rate=1e6,
    )


@pytest.fixture
def store(settings):
    return ObjectStore(settings.objects)


async def ended_tasks(pool, count=1, *, days=10.0, state="succeeded", callback=None, **columns):
    """Creates tasks that ended `days` ago after two attempts, with a callback in that state if
    given."""
    found = await tasks.submit(
        pool, [Submission(type="t", context=Context.encode({"n": n}), **columns) for n in range(count)]
    )
    ids = [one.id for one in found]
    await pool.execute(
        "UPDATE task SET state = $2, step = 1, attempt = 1, failures = 1, finished_at = now() - $3::interval,"
        " updated_at = now() - $3::interval, created_at = now() - $3::interval - interval '1 hour',"
        " result_type = 'json', result = '[1, 2]', error = $4 WHERE id = ANY ($1)",
        ids,
        state,
        timedelta(days=days),
        orjson.dumps({"kind": "E", "message": "nul \0 é", "traceback": "…"}).decode()
        if state == "failed"
        else None,
    )
    await pool.execute(
        "INSERT INTO attempt (task_id, step, attempt, stage, outcome, worker, error, started_at, finished_at)"
        " SELECT id, n, n, 'start', 'next', 'w' || n, CASE n WHEN 1 THEN '{\"kind\":\"E\",\"message\":\"m\"}' END,"
        "        now() - $2::interval, now() - $2::interval"
        " FROM unnest($1::bigint[]) AS i (id), generate_series(0, 1) AS n",
        ids,
        timedelta(days=days),
    )
    if callback is not None:
        await pool.execute(
            "INSERT INTO callback (id, target, task_id, state, attempt, body, due_at, finished_at, headers)"
            " SELECT 'msg_' || id, 'http://x/' || id, id, $2, 2, $3, now(),"
            "        CASE WHEN $2 IN ('delivered', 'dead') THEN now() END, '{\"secret\": \"s\"}'"
            " FROM unnest($1::bigint[]) AS i (id)",
            ids,
            callback,
            '{"name":"task.succeeded","é":"\\u0000"}'.encode(),
        )
    return ids


async def hot_ids(pool):
    return {row["id"] for row in await pool.fetch("SELECT id FROM task")}


async def history_ids(pool):
    return {row["id"] for row in await pool.fetch("SELECT id FROM history")}


async def document(pool, task_id):
    """Returns the JSON document of a task, as the API shows it."""
    shown = documents.detail(await tasks.get(pool, task_id))
    return orjson.loads(orjson.dumps(shown, option=orjson.OPT_UTC_Z))


def archives(tmp_path):
    """Returns the lines of each archive, by object."""
    folder = tmp_path / "objects" / "history"
    return {
        str(file.relative_to(folder)): [
            orjson.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()
        ]
        for file in sorted(folder.rglob("*.ndjson.gz"))
    }


async def test_moved_tasks_are_unchanged(pool, settings, store):
    """O6: history keeps every column, attempt and callback of a task unchanged, including
    difficult text and JSON. History omits the callbacks' headers, which are secrets."""
    ids = [
        *await ended_tasks(pool, 3, labels={"a": "é"}, idempotency_key=None, key="k"),
        *await ended_tasks(pool, 2, state="failed", callback="dead"),
        *await ended_tasks(pool, 2, state="cancelled", callback="delivered", days=9),
    ]
    rows = {row["id"]: dict(row) for row in await pool.fetch("SELECT * FROM task")}
    before = [await document(pool, task_id) for task_id in ids]
    callbacks_before = {row["id"]: dict(row) for row in await pool.fetch("SELECT * FROM callback")}
    assert await History(settings, store).round() is False
    assert await hot_ids(pool) == set()
    assert await pool.fetchval("SELECT count(*) FROM attempt") == 0
    assert await pool.fetchval("SELECT count(*) FROM callback") == 0
    assert [await document(pool, task_id) for task_id in ids] == before
    for row in await pool.fetch("SELECT * FROM history"):
        assert {k: v for k, v in row.items() if k not in ADDED_COLUMNS} == {
            k: v for k, v in rows[row["id"]].items() if k not in LIVE_COLUMNS
        }
        for callback in history.as_task(row)["callbacks_owed"]:
            before_move = callbacks_before[callback["id"]]
            assert "headers" not in callback
            assert bytes.fromhex(callback.pop("body")[2:]) == before_move["body"]
            assert callback == {name: before_move[name] for name in callback}


async def test_history_has_every_column_of_a_task(pool):
    """O6: history has every column of `task`, except those that this file lists as live only."""
    columns = {
        table: {
            row["column_name"]
            for row in await pool.fetch(
                "SELECT column_name FROM information_schema.columns WHERE table_schema = 'penstock' AND table_name = $1",
                table,
            )
        }
        for table in ("task", "history")
    }
    assert columns["history"] - ADDED_COLUMNS == columns["task"] - LIVE_COLUMNS


async def test_recent_and_unfinished_tasks_stay(pool, settings, store):
    """O6: recent tasks, open tasks and tasks with an unfinished callback stay; they move once
    the callback is finished."""
    await ended_tasks(pool, 2, days=KEEP_DAYS - 0.1)
    [waiting] = await tasks.submit(pool, [Submission(type="t", context=Context.encode(1))])
    await pool.execute("UPDATE task SET created_at = now() - interval '1 year' WHERE id = $1", waiting.id)
    pending = await ended_tasks(pool, 2, callback="pending") + await ended_tasks(pool, 2, callback="held")
    old = await ended_tasks(pool, 5)
    remaining = await hot_ids(pool) - set(old)
    service = History(settings, store)
    for _ in range(2):
        assert await service.round() is False
        assert (await hot_ids(pool), await history_ids(pool)) == (remaining, set(old))
    await pool.execute("UPDATE callback SET state = 'dead', finished_at = now()")
    await service.round()
    assert await history_ids(pool) == {*old, *pending}
    assert service.moved == 9


async def test_remaining_tasks_do_not_block_a_move(pool, settings, store, monkeypatch):
    """O6: batches of tasks with unfinished callbacks do not block other tasks, and create no
    partition."""
    monkeypatch.setattr(history_service, "BATCH", 2)
    pending = await ended_tasks(pool, 5, days=50, callback="held")
    old = await ended_tasks(pool, 3, days=20)
    for _ in range(2):
        await History(settings, store).round()
        assert (await hot_ids(pool), await history_ids(pool)) == (set(pending), set(old))
    parts = await history.parts(pool, dropped=True)
    assert sum(row["tasks"] for row in parts) == 3
    assert all(row["tasks"] for row in parts)


async def test_a_move_skips_locked_rows(pool, settings, store):
    """O6: a move waits for no locked row. A task being recovered and a task with a callback
    being replayed stay; the other tasks move."""
    recovered, replayed, *others = await ended_tasks(pool, 6, state="failed", callback="dead")
    async with pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            "UPDATE task SET state = 'ready', finished_at = NULL WHERE id = $1", recovered
        )
        await connection.execute(
            "UPDATE callback SET state = 'pending', finished_at = NULL WHERE task_id = $1", replayed
        )
        await History(settings, store).round()
        assert await history_ids(pool) == set(others)
        await transaction.commit()
    await History(settings, store).round()
    assert await hot_ids(pool) == {recovered, replayed}
    assert await pool.fetchval("SELECT count(*) FROM callback") == 2


async def test_a_task_changed_during_a_move_stays_whole(pool, settings, monkeypatch):
    """O6: a task stays whole in the hot table if a recovery, a replay or another end changes it
    between the move's snapshot and its locks."""
    recovered, ended_again, replayed, other = await ended_tasks(pool, 4, state="failed", callback="dead")
    async with open_session(settings.postgres, "mover") as session:
        await history.create_partitions(
            session, {day_of(datetime.now(UTC) + timedelta(days=days)) for days in (-11, -10, -9, -1, 0, 1)}
        )
        async with pool.acquire() as connection:
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute(
                "UPDATE task SET state = 'ready', finished_at = NULL WHERE id = $1", recovered
            )
            await connection.execute("UPDATE task SET finished_at = now() WHERE id = $1", ended_again)
            await connection.execute(
                "UPDATE callback SET state = 'pending', finished_at = NULL WHERE task_id = $1", replayed
            )
            text = query("history.move")
            # Without SKIP LOCKED the statement waits, and then sees the changed rows.
            waiting = text.replace(" SKIP LOCKED", "")
            assert waiting != text
            monkeypatch.setattr(
                "penstock.postgres.session.bound",
                lambda name, *values, **named: (waiting, *bound(name, *values, **named)[1:]),
            )
            move = asyncio.ensure_future(
                history.move(
                    session, [recovered, ended_again, replayed, other], datetime.now(UTC) - timedelta(days=7)
                )
            )
            await locked(pool, session.pid)
            await transaction.commit()
        assert await move == (1, [])
    assert await history_ids(pool) == {other}
    assert await hot_ids(pool) == {recovered, ended_again, replayed}
    assert await pool.fetchval("SELECT count(*) FROM callback") == 3


async def locked(pool, pid):
    await wait_until(
        lambda: pool.fetchval("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1", pid)
    )


async def test_a_day_is_archived_before_it_is_dropped(pool, settings, store, tmp_path):
    """O6: a day past its retention is archived as NDJSON, one line a task as the API showed it.
    Then its partition is dropped, and its record names the object. Later days stay."""
    old = [
        *await ended_tasks(pool, 450, days=40, callback="delivered", labels={"a": "b"}),
        *await ended_tasks(pool, 2, days=40, state="failed"),
    ]
    # The tasks may span two days.
    young = await ended_tasks(pool, 3, days=20)
    service = History(settings, store)
    await service.round()
    assert await history_ids(pool) == {*old, *young}
    before = {task_id: await document(pool, task_id) for task_id in old}
    await service.round()
    assert await history_ids(pool) == set(young)
    found = archives(tmp_path)
    lines = [line for part in found.values() for line in part]
    assert {line["id"]: line for line in lines} == {
        task_id: {
            **shown,
            "callbacks_owed": [
                {**callback, "body": '{"name":"task.succeeded","é":"\\u0000"}'}
                for callback in shown["callbacks_owed"]
            ],
        }
        for task_id, shown in before.items()
    }
    assert len(lines) == len(old)
    assert "secret" not in str(lines)
    [*dropped] = [row for row in await history.parts(pool, dropped=True) if row["dropped_at"]]
    assert {row["object"].removeprefix("history/"): row["tasks"] for row in dropped} == {
        name: len(part) for name, part in found.items()
    }
    assert (service.moved, service.archived, service.dropped) == (455, 452, len(found))
    assert service.archived_bytes == sum(row["bytes"] for row in dropped)
    with pytest.raises(NotFound):
        await tasks.get(pool, old[0])


async def test_a_day_is_dropped_without_archival(pool, settings, store, tmp_path):
    """O6: without archival a day is dropped and no object is written. With unlimited retention
    no day is dropped."""
    await ended_tasks(pool, 3, days=40)
    unlimited = dataclasses.replace(settings, history_retain_days=0.0)
    for _ in range(2):
        await History(unlimited, store).round()
    assert len(await history_ids(pool)) == 3
    await History(dataclasses.replace(settings, history_archive=False), store).round()
    assert (await history_ids(pool), archives(tmp_path)) == (set(), {})


class Failing(ObjectStore):
    """An object store that replaces the write of an object by a fault."""

    def __init__(self, url, fault):
        super().__init__(url)
        self.fault = fault

    async def put_chunks(self, key, chunks):
        await self.fault(super().put_chunks, key, chunks)


async def unavailable(_put, _key, _chunks):
    raise ObjectsUnavailable("away")


async def truncated(put, key, chunks):
    whole = b"".join([chunk async for chunk in chunks])

    async def all_but_the_end():
        yield whole[:-9]

    await put(key, all_but_the_end())


async def emptied(put, key, chunks):
    _ = [chunk async for chunk in chunks]

    async def nothing():
        yield gzip.compress(b"")

    await put(key, nothing())


async def replaced(put, key, chunks):
    lines = gzip.decompress(b"".join([chunk async for chunk in chunks])).count(b"\n")

    async def others():
        yield gzip.compress(b"{}\n" * lines)

    await put(key, others())


@pytest.mark.parametrize("fault", [unavailable, truncated, emptied, replaced])
async def test_a_day_without_an_archive_is_not_dropped(pool, settings, store, fault):
    """O6: a day without a correct archive stays readable and is archived again, when the store
    is unavailable or holds other data. Other tasks still move."""
    await ended_tasks(pool, 3, days=40)
    failing = History(settings, Failing(settings.objects, fault))
    for _ in range(3):
        await failing.round()
    [*parts] = await history.parts(pool)
    assert all(row["archived_at"] is None for row in parts)
    await ended_tasks(pool, 2)
    await failing.round()
    assert len(await history_ids(pool)) == 5
    assert failing.dropped == 0
    await History(settings, store).round()
    assert len(await history_ids(pool)) == 2


async def test_a_missing_archive_is_written_again_before_the_drop(
    pool, settings, store, tmp_path, monkeypatch
):
    """O6: an archive is verified again just before the drop, because days may pass after it was
    written. A missing archive is written again."""
    ids = await ended_tasks(pool, 3, days=40)
    await History(settings, store).round()

    async def refuse(*_, **__):
        raise PostgresUnavailable("cut")

    monkeypatch.setattr(history, "drop", refuse)
    with pytest.raises(PostgresUnavailable, match="cut"):
        await History(settings, store).round()
    monkeypatch.undo()
    [file] = (tmp_path / "objects" / "history").rglob("*.gz")
    file.unlink()
    service = History(settings, store)
    await service.round()
    assert [line["id"] for [*lines] in archives(tmp_path).values() for line in lines] == ids
    assert (await history_ids(pool), service.dropped) == (set(), 1)


async def test_a_move_after_the_drop_of_its_day_starts_another_part(pool, settings, store, tmp_path):
    """O6: a task that moves after its day was dropped goes to another part of the archive. No
    task moves into a sealed part."""
    ids = await ended_tasks(pool, 3, days=40)
    [late] = await ended_tasks(pool, 1, days=40, callback="held")
    await pool.execute("UPDATE task SET finished_at = (SELECT min(finished_at) FROM task)")
    service = History(settings, store)
    for _ in range(2):
        await service.round()
    assert await hot_ids(pool) == {late}
    await pool.execute("UPDATE callback SET state = 'dead', finished_at = now()")
    await service.round()
    await pool.execute("UPDATE history_part SET sealed_at = now() WHERE dropped_at IS NULL")
    [later] = await ended_tasks(pool, 1, days=40)
    await pool.execute("UPDATE task SET finished_at = (SELECT min(finished_at) FROM history)")
    async with open_session(settings.postgres, "mover") as session:
        assert await history.move(session, [later], datetime.now(UTC)) == (0, [])
    for _ in range(3):
        await service.round()
    found = {
        name.partition("/")[2]: [line["id"] for line in lines] for name, lines in archives(tmp_path).items()
    }
    assert found == {"part-1.ndjson.gz": ids, "part-2.ndjson.gz": [late], "part-3.ndjson.gz": [later]}
    assert (await hot_ids(pool), await history_ids(pool)) == (set(), set())


class BackendKiller:
    """Terminates the mover's backend before or after its n-th statement, as a crash would."""

    def __init__(self, dsn, number, after):
        self.dsn = dsn
        self.number = number
        self.after = after
        self.count = 0
        self.killed = False

    @contextlib.asynccontextmanager
    async def session(self, dsn, name, **more):
        async with open_session(dsn, name, **more) as session:
            fetch = session.fetch

            async def fetch_or_kill(statement, *arguments, **named):
                now, self.count = self.count == self.number, self.count + 1
                if now and self.after:
                    await fetch(statement, *arguments, **named)
                if now:
                    self.killed = True
                    await self.kill(session)
                return await fetch(statement, *arguments, **named)

            session.fetch = fetch_or_kill
            yield session

    async def kill(self, session):
        other = await asyncpg.connect(self.dsn)
        await other.execute("SELECT pg_terminate_backend($1, 10000)", session.pid)
        await other.close()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_crash_at_any_statement_keeps_each_task_once(
    pool, settings, store, tmp_path, monkeypatch, after
):
    """O6, S1: after a crash at any statement of moving, sealing, archiving or dropping, each
    task is whole and in one place. The next run completes the work, and the archive has each task
    once."""
    monkeypatch.setattr(history_service, "BATCH", 4)
    monkeypatch.setattr(history_service, "PAGE", 3)
    number, killer = 0, None
    expected = {}
    while killer is None or killer.killed:
        ids = await ended_tasks(pool, 7, days=40, callback="delivered") + await ended_tasks(
            pool, 2, days=40, state="failed"
        )
        before = {task_id: await document(pool, task_id) for task_id in ids}
        expected |= before
        killer = BackendKiller(settings.postgres, number, after)
        monkeypatch.setattr(history_service, "open_session", killer.session)
        with contextlib.suppress(SessionLost, PostgresUnavailable):
            # The first round moves tasks, the second archives and drops their day.
            for _ in range(2):
                await History(settings, store).round()
        monkeypatch.setattr(history_service, "open_session", open_session)
        in_hot, in_history = await hot_ids(pool), await history_ids(pool)
        assert not in_hot & in_history
        for task_id in in_hot | in_history:
            assert await document(pool, task_id) == before[task_id]
        removed = set(ids) - in_hot - in_history
        assert removed <= {line["id"] for lines in archives(tmp_path).values() for line in lines}
        for _ in range(2):
            await History(settings, store).round()
        number += 1
    lines = [line for part in archives(tmp_path).values() for line in part]
    assert len(lines) == len(expected)
    assert {line["id"]: {**line, "callbacks_owed": 0} for line in lines} == {
        task_id: {**shown, "callbacks_owed": 0} for task_id, shown in expected.items()
    }
    assert await pool.fetchval("SELECT count(*) FROM attempt") == 0
    # The loop has interrupted each statement of both rounds; there are more than 15.
    assert number > 15


async def test_one_process_moves_tasks_at_a_time(pool, settings, store):
    """O6, S7: a second process raises Conflict while the first holds the lock, and works after
    the first ends."""
    ids = await ended_tasks(pool, 3)
    async with open_session(settings.postgres, "other") as session:
        assert await history.lock(session)
        with pytest.raises(Conflict, match="another process"):
            await History(settings, store).round()
        assert await hot_ids(pool) == set(ids)
    await History(settings, store).round()
    assert await history_ids(pool) == set(ids)


async def test_postgresql_drops_only_sealed_and_archived_parts(pool, settings, store):
    """O6: the statement that drops a part checks that it is sealed and, if required,
    archived."""
    await ended_tasks(pool, 1, days=40)
    await History(settings, store).round()
    [row] = await history.parts(pool)
    part = history.part_of(row)
    async with open_session(settings.postgres, "mover") as session:
        assert await history.lock(session)
        assert not await history.record_archived(session, part, 1, 1, "0")
        assert not await history.drop(session, part, archived=False)
        await history.seal(session, part)
        assert not await history.drop(session, part, archived=True)
        assert len(await history_ids(pool)) == 1
        assert await history.drop(session, part, archived=False)
        assert not await history.drop(session, part, archived=False)
    assert await history_ids(pool) == set()


async def test_a_day_that_is_being_read_is_dropped_later(pool, settings, store):
    """O6: a drop neither disturbs a reader of history nor blocks other statements. It gives up
    and runs again later."""
    await ended_tasks(pool, 3, days=40)
    service = History(settings, store)
    await service.round()
    async with pool.acquire() as connection, connection.transaction():
        assert len(await connection.fetch("SELECT id FROM history")) == 3
        # A partition for another day can be created meanwhile.
        await ended_tasks(pool, 1, days=15)
        await service.round()
        assert (service.moved, service.archived, service.dropped) == (4, 3, 0)
        assert len(await history_ids(pool)) == 4
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("LOCK TABLE history IN SHARE UPDATE EXCLUSIVE MODE")
        await ended_tasks(pool, 1, days=16)
        with pytest.raises(PostgresUnavailable, match="canceling statement due to lock timeout"):
            await service.round()
    await service.round()
    assert len(await history_ids(pool)) == 2


async def test_a_partition_dropped_by_hand_does_not_end_the_process(pool, settings, store):
    """O6: a partition that an operator dropped keeps its tasks in the hot table, and the error
    names the remedy. After the retention the part's record is deleted."""
    ids = await ended_tasks(pool, 2)
    await History(settings, store).round()
    [name] = [
        row["name"]
        for row in await pool.fetch(
            "SELECT inhrelid::regclass::text AS name FROM pg_inherits JOIN pg_class p"
            " ON p.oid = inhparent WHERE p.relname = 'history'"
        )
    ]
    await pool.execute(f"DROP TABLE {name}")
    late = await ended_tasks(pool, 2)
    await pool.execute("UPDATE task SET finished_at = (SELECT day + time '00:01' FROM history_part)")
    with pytest.raises(PostgresUnavailable, match="dropped by hand"):
        await History(settings, store).round()
    assert await hot_ids(pool) == set(late)
    assert not await history_ids(pool) & {*ids, *late}
    await History(dataclasses.replace(settings, history_retain_days=8.0), store).round()
    assert await history_ids(pool) == set(late)
    await History(dataclasses.replace(settings, history_retain_days=8.0), store).round()
    assert await history.parts(pool) == []


async def test_a_dry_run_changes_nothing(pool, settings, store):
    """O6: a dry run reports the tasks and days it would move and drop, and changes nothing."""
    await ended_tasks(pool, 3, days=40)
    await History(settings, store).round()
    await ended_tasks(pool, 2)
    report = await dry_run(settings, pool)
    assert (report["ended"], report["more"]) == (2, False)
    assert [(part["tasks"], part["object"].endswith("part-1.ndjson.gz")) for part in report["retired"]] == [
        (3, True)
    ]
    assert (len(await hot_ids(pool)), len(await history_ids(pool))) == (2, 3)


async def test_an_idempotency_key_names_its_task_until_the_move(pool, settings, store, monkeypatch):
    """T5: an idempotency key names its task until the task has moved. A submission during the move
    returns the earlier task."""
    same = Submission(type="t", context=Context.encode(1), idempotency_key="k")
    [first] = await ended_tasks(pool, 1, idempotency_key="k")
    assert await tasks.submit(pool, [same]) == [tasks.Submitted(first, created=False)]

    class Moving:
        """The pool of a submitter; the task moves between its statements."""

        async def fetch(self, text, *arguments):
            rows = await pool.fetch(text, *arguments)
            await History(settings, store).round()
            return rows

    other = Submission(type="t", context=Context.encode(1), idempotency_key="other")
    [existing, new] = await tasks.submit(Moving(), [same, other])
    assert existing == tasks.Submitted(first, created=False)
    assert new.created
    assert await history_ids(pool) == {first}
    [again] = await tasks.submit(pool, [same])
    assert again.created
    assert again.id != first


async def test_a_task_read_during_its_move_is_whole(pool, settings, store):
    """O6: a read that overlaps a move returns the whole task with its attempts."""
    for number in range(4):
        [task_id] = await ended_tasks(pool, 1, callback="delivered")
        before = await document(pool, task_id)

        class Moving:
            def __init__(self, at):
                self.at = at
                self.count = 0

            async def _before(self):
                if self.count == self.at:
                    await History(settings, store).round()
                self.count += 1

            async def fetch(self, *arguments):
                await self._before()
                return await pool.fetch(*arguments)

            async def fetchrow(self, *arguments):
                await self._before()
                return await pool.fetchrow(*arguments)

        assert await document(Moving(number), task_id) == before
        assert await history_ids(pool) >= {task_id}


async def test_queries_for_many_tasks_include_history(pool, settings, store):
    """O6: queries for the states and ids of many tasks include history."""
    old = await ended_tasks(pool, 3)
    young = await ended_tasks(pool, 2, days=1, state="failed")
    await History(settings, store).round()
    assert await tasks.states_of(pool, [*old, *young, 10**9]) == {"succeeded": 3, "failed": 2}
    assert await tasks.existing_ids(pool, [*old, *young, 10**9]) == {*old, *young}


async def test_late_results_of_a_moved_task_change_nothing(pool, settings, store):
    """W4, H10, C5: a result, a late result and a cancellation of a moved task change nothing and
    raise no error."""
    [task_id] = await ended_tasks(pool, 1, callback="dead")
    await pool.execute("UPDATE attempt SET outcome = 'expired' WHERE task_id = $1", task_id)
    before = await document(pool, task_id)
    await History(settings, store).round()
    fence = Fence(task_id, 1, "start", 1)
    conclusion = conclude(fence, Outcome.DONE)
    ending = advance.Ending(fence=fence, outcome=Outcome.DONE, conclusion=conclusion, worker="w")
    for late in (False, True):
        found = await advance.advance(pool, [ending], late=late)
        assert found.applied == set()
        assert not found.outbox.events
    assert await advance.stages_of(pool, [fence]) == {}
    assert await advance.late_attempts(pool, [fence]) == {}
    assert await advance.cancel(pool, [task_id]) == ([], OutboxEntry())
    assert await document(pool, task_id) == before


async def test_release_reads_the_same_with_finished_tasks_and_history(pool, settings, store):
    """O6: 100,000 finished tasks, in the hot table or in history, change neither the plan of a
    release nor the entries it reads. The move reads one index."""
    await pool.execute(
        "INSERT INTO task (type, state, stage, content_type, context)"
        " SELECT 't', 'ready', 'start', 'json', 'null' FROM generate_series(1, 1000)"
    )
    connection = await connect(settings.postgres, "plans")

    async def release():
        await pool.execute("VACUUM ANALYZE task")
        nodes = await plan(
            connection,
            "release.release",
            type="t",
            limit=10,
            confirmed=[],
            tracked=False,
            excluded=[],
            version=None,
        )
        return index_entries(nodes), sorted((n["Node Type"], n.get("Index Name", "")) for n in nodes)

    baseline = await release()
    assert baseline[0]["task_release"] == 10
    assert ("Index Only Scan", "task_release") in baseline[1]
    await pool.execute(
        "INSERT INTO task (type, state, stage, content_type, context, finished_at)"
        " SELECT 't', 'succeeded', 'start', 'json', 'null', now() - interval '20 days' + n * interval '1 second'"
        " FROM generate_series(1, 100000) AS n"
    )
    assert await release() == baseline
    nodes = await plan(
        connection,
        "history.next_ended",
        finished_at=datetime(2000, 1, 1, tzinfo=UTC),
        id=0,
        before=datetime.now(UTC),
        limit=500,
    )
    assert index_entries(nodes) == {"task_finished": 500}
    assert "Index Only Scan" in [node["Node Type"] for node in nodes]
    assert await History(settings, store).round() is False
    assert await pool.fetchval("SELECT count(*) FROM history") == 100_000
    assert await release() == baseline
    await connection.close()
