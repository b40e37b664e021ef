"""History on the real PostgreSQL and an object store in a folder: what moves, what stays, and how days are retired."""

import asyncio
import contextlib
import dataclasses
import gzip
from datetime import UTC, datetime, timedelta

import asyncpg
import orjson
import pytest
from tests.integration.test_keys import entries, plan
from tests.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.event import Owed
from penstock.contracts.submission import Submission
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.history import day_of
from penstock.errors import Conflict, NotFound, ObjectsUnavailable, PostgresUnavailable, SessionLost
from penstock.objects import ObjectStore
from penstock.postgres import advance, documents, history, tasks, types
from penstock.postgres.connection import connect, open_pool
from penstock.postgres.session import open_session
from penstock.task_sync import history as moving
from penstock.task_sync.history import History, rehearse
from penstock.task_sync.settings import TaskSyncSettings

KEPT = 7.0
RETAINED = 30.0
# What only tasks under way have, and what only history has.
LIVE = {"lease_partition", "lease_ms", "max_attempts", "pausing", "tracked", "due_at", "traceparent"}
ADDED = {"attempts", "callbacks_owed", "moved_at"}


@pytest.fixture
def settings(database, tmp_path):
    return TaskSyncSettings(
        postgres=database,
        objects=f"file://{tmp_path}/objects",
        history_keep_days=KEPT,
        history_retain_days=RETAINED,
        history_rate=1e6,
    )


@pytest.fixture
def store(settings):
    return ObjectStore(settings.objects)


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=1))
        yield pool


async def ended(pool, count=1, *, days=10.0, state="succeeded", callback=None, **columns):
    """Tasks that ended so many days ago, each after two attempts; with a callback, each with one in that state."""
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


async def hot(pool):
    return {row["id"] for row in await pool.fetch("SELECT id FROM task")}


async def moved(pool):
    return {row["id"] for row in await pool.fetch("SELECT id FROM history")}


async def document(pool, task_id):
    """What the API shows of a task, as JSON."""
    shown = documents.detail(await tasks.get(pool, task_id))
    return orjson.loads(orjson.dumps(shown, option=orjson.OPT_UTC_Z))


def archives(tmp_path):
    """What the archive holds, by object."""
    folder = tmp_path / "objects" / "history"
    return {
        str(file.relative_to(folder)): [
            orjson.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()
        ]
        for file in sorted(folder.rglob("*.ndjson.gz"))
    }


async def test_what_is_moved_is_what_it_was(pool, settings, store):
    """Scale: every column, attempt and callback of a task is in history as it was, also what text and JSON can barely hold;
    only the headers of callbacks, which are secrets, are not."""
    ids = [
        *await ended(pool, 3, labels={"a": "é"}, idempotency_key=None, key="k"),
        *await ended(pool, 2, state="failed", callback="dead"),
        *await ended(pool, 2, state="cancelled", callback="delivered", days=9),
    ]
    rows = {row["id"]: dict(row) for row in await pool.fetch("SELECT * FROM task")}
    before = [await document(pool, task_id) for task_id in ids]
    owed = {row["id"]: dict(row) for row in await pool.fetch("SELECT * FROM callback")}
    assert await History(settings, store).round() is False
    assert await hot(pool) == set()
    assert await pool.fetchval("SELECT count(*) FROM attempt") == 0
    assert await pool.fetchval("SELECT count(*) FROM callback") == 0
    assert [await document(pool, task_id) for task_id in ids] == before
    for row in await pool.fetch("SELECT * FROM history"):
        assert {k: v for k, v in row.items() if k not in ADDED} == {
            k: v for k, v in rows[row["id"]].items() if k not in LIVE
        }
        for callback in history.as_task(row)["callbacks_owed"]:
            was = owed[callback["id"]]
            assert "headers" not in callback
            assert bytes.fromhex(callback.pop("body")[2:]) == was["body"]
            assert callback == {name: was[name] for name in callback}


async def test_history_has_every_column_of_a_task(pool):
    """Scale: a column that is added to task is moved, too, or this test says that it is only of use while a task is under way."""
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
    assert columns["history"] - ADDED == columns["task"] - LIVE


async def test_what_has_not_ended_long_ago_or_owes_a_callback_stays(pool, settings, store):
    """Scale: what is young, under way or owes somebody a callback is not moved; once nothing is owed it is."""
    await ended(pool, 2, days=KEPT - 0.1)
    [waiting] = await tasks.submit(pool, [Submission(type="t", context=Context.encode(1))])
    await pool.execute("UPDATE task SET created_at = now() - interval '1 year' WHERE id = $1", waiting.id)
    owing = await ended(pool, 2, callback="pending") + await ended(pool, 2, callback="held")
    old = await ended(pool, 5)
    stay = await hot(pool) - set(old)
    service = History(settings, store)
    for _ in range(2):
        assert await service.round() is False
        assert (await hot(pool), await moved(pool)) == (stay, set(old))
    await pool.execute("UPDATE callback SET state = 'dead', finished_at = now()")
    await service.round()
    assert await moved(pool) == {*old, *owing}
    assert service.moved == 9


async def test_what_stays_does_not_keep_others_from_moving(pool, settings, store, monkeypatch):
    """Scale: whole batches of tasks that owe callbacks are passed over, and no partition is made for them, nor in later rounds."""
    monkeypatch.setattr(moving, "BATCH", 2)
    owing = await ended(pool, 5, days=50, callback="held")
    old = await ended(pool, 3, days=20)
    for _ in range(2):
        await History(settings, store).round()
        assert (await hot(pool), await moved(pool)) == (set(owing), set(old))
    parts = await history.parts(pool, dropped=True)
    assert sum(row["tasks"] for row in parts) == 3
    assert all(row["tasks"] for row in parts)


async def test_what_another_holds_is_left_and_waited_for_by_nobody(pool, settings, store):
    """Scale: moving waits for no row: a task that is being recovered and one whose callback is being replayed stay, as they have
    become; all others are moved meanwhile."""
    recovered, replayed, *others = await ended(pool, 6, state="failed", callback="dead")
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
        assert await moved(pool) == set(others)
        await transaction.commit()
    await History(settings, store).round()
    assert await hot(pool) == {recovered, replayed}
    assert await pool.fetchval("SELECT count(*) FROM callback") == 2


async def test_what_changes_while_it_is_moved_is_not_torn_apart(pool, settings, monkeypatch):
    """Scale: a callback that is replayed, or a task that is recovered, between the snapshot of the statement that moves and its
    locks keeps the task where it is, whole; so does its having ended anew meanwhile."""
    recovered, anew, replayed, other = await ended(pool, 4, state="failed", callback="dead")
    async with open_session(settings.postgres, "mover") as session:
        await history.open_days(
            session, {day_of(datetime.now(UTC) + timedelta(days=days)) for days in (-11, -10, -9, -1, 0, 1)}
        )
        async with pool.acquire() as connection:
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute(
                "UPDATE task SET state = 'ready', finished_at = NULL WHERE id = $1", recovered
            )
            await connection.execute("UPDATE task SET finished_at = now() WHERE id = $1", anew)
            await connection.execute(
                "UPDATE callback SET state = 'pending', finished_at = NULL WHERE task_id = $1", replayed
            )
            text = history.query("history.move")
            # Waiting in place of leaving what is held: it then goes on with what has become of it.
            waiting = text.replace(" SKIP LOCKED", "")
            assert waiting != text
            monkeypatch.setattr("penstock.postgres.session.query", lambda name: waiting)
            move = asyncio.ensure_future(
                history.move(
                    session, [recovered, anew, replayed, other], datetime.now(UTC) - timedelta(days=7)
                )
            )
            await locked(pool, session.pid)
            await transaction.commit()
        assert await move == (1, [])
    assert await moved(pool) == {other}
    assert await hot(pool) == {recovered, anew, replayed}
    assert await pool.fetchval("SELECT count(*) FROM callback") == 3


async def locked(pool, pid):
    await wait_until(
        lambda: pool.fetchval("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1", pid)
    )


async def test_a_day_is_archived_as_it_was_and_only_then_dropped(pool, settings, store, tmp_path):
    """Scale: a day that is over is written as NDJSON, a line for each task with its attempts and callbacks, as the API showed it;
    then its partition is dropped, and its note says where it is. Days that are not over stay."""
    old = [
        *await ended(pool, 450, days=40, callback="delivered", labels={"a": "b"}),
        *await ended(pool, 2, days=40, state="failed"),
    ]
    # The day before may have begun when they were made.
    young = await ended(pool, 3, days=20)
    service = History(settings, store)
    await service.round()
    assert await moved(pool) == {*old, *young}
    before = {task_id: await document(pool, task_id) for task_id in old}
    await service.round()
    assert await moved(pool) == set(young)
    found = archives(tmp_path)
    lines = [line for part in found.values() for line in part]
    assert {line["id"]: line for line in lines} == {
        task_id: {
            **shown,
            "callbacks_owed": [
                {**one, "body": '{"name":"task.succeeded","é":"\\u0000"}'} for one in shown["callbacks_owed"]
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


async def test_without_archival_a_day_is_dropped_as_it_is(pool, settings, store, tmp_path):
    """Scale: archival is an option; without it nothing is written. Kept for ever, nothing is dropped."""
    await ended(pool, 3, days=40)
    for_ever = dataclasses.replace(settings, history_retain_days=0.0)
    for _ in range(2):
        await History(for_ever, store).round()
    assert len(await moved(pool)) == 3
    await History(dataclasses.replace(settings, history_archive=False), store).round()
    assert (await moved(pool), archives(tmp_path)) == (set(), {})


class Failing(ObjectStore):
    """A store that does something else with the object it is to write."""

    def __init__(self, url, fault):
        super().__init__(url)
        self.fault = fault

    async def put_chunks(self, key, chunks):
        await self.fault(super().put_chunks, key, chunks)


async def away(_put, _key, _chunks):
    raise ObjectsUnavailable("away")


async def cut_short(put, key, chunks):
    whole = b"".join([chunk async for chunk in chunks])

    async def most():
        yield whole[:-9]

    await put(key, most())


async def emptied(put, key, chunks):
    _ = [chunk async for chunk in chunks]

    async def nothing():
        yield gzip.compress(b"")

    await put(key, nothing())


async def exchanged(put, key, chunks):
    lines = gzip.decompress(b"".join([chunk async for chunk in chunks])).count(b"\n")

    async def others():
        yield gzip.compress(b"{}\n" * lines)

    await put(key, others())


@pytest.mark.parametrize("fault", [away, cut_short, emptied, exchanged])
async def test_nothing_is_dropped_that_is_not_archived(pool, settings, store, fault):
    """Scale: while the store is away, or keeps something else than was written, a day stays, can be read, and is tried again;
    tasks go on being moved."""
    await ended(pool, 3, days=40)
    failing = History(settings, Failing(settings.objects, fault))
    for _ in range(3):
        await failing.round()
    [*parts] = await history.parts(pool)
    assert all(row["archived_at"] is None for row in parts)
    await ended(pool, 2)
    await failing.round()
    assert len(await moved(pool)) == 5
    assert failing.dropped == 0
    await History(settings, store).round()
    assert len(await moved(pool)) == 2


async def test_lines_that_are_missing_are_noticed(pool, settings, store, monkeypatch):
    """Scale: an object that is whole and has fewer tasks than its partition is no archive of it."""
    await ended(pool, 3, days=40)
    await History(settings, store).round()
    monkeypatch.setattr(moving, "_lines", lambda rows: [b"{}\n"] * (len(rows) - 1))
    await History(settings, store).round()
    assert len(await moved(pool)) == 3
    monkeypatch.undo()
    await History(settings, store).round()
    assert len(await moved(pool)) == 0


async def test_an_archive_that_is_gone_before_the_drop_is_written_again(
    pool, settings, store, tmp_path, monkeypatch
):
    """Scale: what was found whole is looked at once more just before its partition goes, since days may be between the two."""
    ids = await ended(pool, 3, days=40)
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
    assert (await moved(pool), service.dropped) == (set(), 1)


async def test_what_is_moved_after_its_day_was_dropped_is_another_part(pool, settings, store, tmp_path):
    """Scale: a task whose callback was owed for longer than its day was kept is neither lost nor makes the archive wrong; nor
    is anything moved into a day that is sealed."""
    ids = await ended(pool, 3, days=40)
    [late] = await ended(pool, 1, days=40, callback="held")
    await pool.execute("UPDATE task SET finished_at = (SELECT min(finished_at) FROM task)")
    service = History(settings, store)
    for _ in range(2):
        await service.round()
    assert await hot(pool) == {late}
    await pool.execute("UPDATE callback SET state = 'dead', finished_at = now()")
    await service.round()
    await pool.execute("UPDATE history_part SET sealed_at = now() WHERE dropped_at IS NULL")
    [later] = await ended(pool, 1, days=40)
    await pool.execute("UPDATE task SET finished_at = (SELECT min(finished_at) FROM history)")
    async with open_session(settings.postgres, "mover") as session:
        assert await history.move(session, [later], datetime.now(UTC)) == (0, [])
    for _ in range(3):
        await service.round()
    found = {
        name.partition("/")[2]: [line["id"] for line in lines] for name, lines in archives(tmp_path).items()
    }
    assert found == {"part-1.ndjson.gz": ids, "part-2.ndjson.gz": [late], "part-3.ndjson.gz": [later]}
    assert (await hot(pool), await moved(pool)) == (set(), set())


class Cuts:
    """Ends the mover's backend before or after its n-th statement, or its write of an object, as a crash would."""

    def __init__(self, dsn, number, after):
        self.dsn = dsn
        self.number = number
        self.after = after
        self.count = 0
        self.cut = False

    @contextlib.asynccontextmanager
    async def session(self, dsn, name, **more):
        async with open_session(dsn, name, **more) as session:
            fetch = session.fetch

            async def cut(statement, *arguments):
                now, self.count = self.count == self.number, self.count + 1
                if now and self.after:
                    await fetch(statement, *arguments)
                if now:
                    self.cut = True
                    await self.kill(session)
                return await fetch(statement, *arguments)

            session.fetch = cut
            yield session

    async def kill(self, session):
        other = await asyncpg.connect(self.dsn)
        await other.execute("SELECT pg_terminate_backend($1, 10000)", session.pid)
        await other.close()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_any_statement_nothing_is_lost_or_there_twice(
    pool, settings, store, tmp_path, monkeypatch, after
):
    """Scale, S1: whichever statement of moving, sealing, archiving and dropping is the last, each task is in one place, whole; and
    whoever goes on brings it to its end: the archive has each once."""
    monkeypatch.setattr(moving, "BATCH", 4)
    monkeypatch.setattr(moving, "PAGE", 3)
    number, cuts = 0, None
    everything = {}
    while cuts is None or cuts.cut:
        ids = await ended(pool, 7, days=40, callback="delivered") + await ended(
            pool, 2, days=40, state="failed"
        )
        before = {task_id: await document(pool, task_id) for task_id in ids}
        everything |= before
        cuts = Cuts(settings.postgres, number, after)
        monkeypatch.setattr(moving, "open_session", cuts.session)
        with contextlib.suppress(SessionLost, PostgresUnavailable):
            # The first moves, the second retires.
            for _ in range(2):
                await History(settings, store).round()
        monkeypatch.setattr(moving, "open_session", open_session)
        here, there = await hot(pool), await moved(pool)
        assert not here & there
        for task_id in here | there:
            assert await document(pool, task_id) == before[task_id]
        gone = set(ids) - here - there
        assert gone <= {line["id"] for lines in archives(tmp_path).values() for line in lines}
        for _ in range(2):
            await History(settings, store).round()
        number += 1
    lines = [line for part in archives(tmp_path).values() for line in part]
    assert len(lines) == len(everything)
    assert {line["id"]: {**line, "callbacks_owed": 0} for line in lines} == {
        task_id: {**shown, "callbacks_owed": 0} for task_id, shown in everything.items()
    }
    assert await pool.fetchval("SELECT count(*) FROM attempt") == 0
    # Own, parts, look, open, move in batches; then seal, pages, count, note and drop.
    assert number > 15


async def test_one_process_does_it_at_a_time(pool, settings, store):
    """Scale, S7: while one holds the lock another does nothing, and says so; when it has died, it does."""
    ids = await ended(pool, 3)
    async with open_session(settings.postgres, "other") as session:
        assert await history.own(session)
        with pytest.raises(Conflict, match="another process"):
            await History(settings, store).round()
        assert await hot(pool) == set(ids)
    await History(settings, store).round()
    assert await moved(pool) == set(ids)


async def test_postgresql_itself_drops_only_what_is_sealed_and_archived(pool, settings, store):
    """Scale: whatever a caller believes, the statement that drops goes by the notes."""
    await ended(pool, 1, days=40)
    await History(settings, store).round()
    [row] = await history.parts(pool)
    part = history.part_of(row)
    async with open_session(settings.postgres, "mover") as session:
        assert await history.own(session)
        assert not await history.archived(session, part, 1, 1, "0")
        assert not await history.drop(session, part, archived=False)
        await history.seal(session, part)
        assert not await history.drop(session, part, archived=True)
        assert len(await moved(pool)) == 1
        assert await history.drop(session, part, archived=False)
        assert not await history.drop(session, part, archived=False)
    assert await moved(pool) == set()


async def test_a_day_that_is_being_read_is_dropped_later(pool, settings, store):
    """Scale: whoever reads history neither is disturbed nor holds up others: the drop gives up and is tried again."""
    await ended(pool, 3, days=40)
    service = History(settings, store)
    await service.round()
    async with pool.acquire() as connection, connection.transaction():
        assert len(await connection.fetch("SELECT id FROM history")) == 3
        # Another day can begin meanwhile.
        await ended(pool, 1, days=15)
        await service.round()
        assert (service.moved, service.archived, service.dropped) == (4, 3, 0)
        assert len(await moved(pool)) == 4
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("LOCK TABLE history IN SHARE UPDATE EXCLUSIVE MODE")
        await ended(pool, 1, days=16)
        with pytest.raises(PostgresUnavailable, match="history is locked"):
            await service.round()
    await service.round()
    assert len(await moved(pool)) == 2


async def test_a_partition_dropped_by_hand_ends_nobody(pool, settings, store):
    """Scale: what would go there stays, and what to do is said; a day that is over is struck out."""
    ids = await ended(pool, 2)
    await History(settings, store).round()
    [name] = [
        row["name"]
        for row in await pool.fetch(
            "SELECT inhrelid::regclass::text AS name FROM pg_inherits JOIN pg_class p"
            " ON p.oid = inhparent WHERE p.relname = 'history'"
        )
    ]
    await pool.execute(f"DROP TABLE {name}")
    late = await ended(pool, 2)
    await pool.execute("UPDATE task SET finished_at = (SELECT day + time '00:01' FROM history_part)")
    with pytest.raises(PostgresUnavailable, match="dropped by hand"):
        await History(settings, store).round()
    assert await hot(pool) == set(late)
    assert not await moved(pool) & {*ids, *late}
    await History(dataclasses.replace(settings, history_retain_days=8.0), store).round()
    assert await moved(pool) == set(late)
    await History(dataclasses.replace(settings, history_retain_days=8.0), store).round()
    assert await history.parts(pool) == []


async def test_a_rehearsal_changes_nothing(pool, settings, store):
    """Scale: what would be moved and dropped is told, and left as it is."""
    await ended(pool, 3, days=40)
    await History(settings, store).round()
    await ended(pool, 2)
    told = await rehearse(settings, pool)
    assert (told["ended"], told["more"]) == (2, False)
    assert [(one["tasks"], one["object"].endswith("part-1.ndjson.gz")) for one in told["retired"]] == [
        (3, True)
    ]
    assert (len(await hot(pool)), len(await moved(pool))) == (2, 3)


async def test_a_key_is_known_until_its_task_has_moved(pool, settings, store, monkeypatch):
    """T5: a key names its task for as long as that is in the hot table, and is free afterwards; who submits it in the moment in
    which it moves is told of the task there was."""
    same = Submission(type="t", context=Context.encode(1), idempotency_key="k")
    [first] = await ended(pool, 1, idempotency_key="k")
    assert await tasks.submit(pool, [same]) == [tasks.Submitted(first, created=False)]

    class Moving:
        """The pool of a submitter; between its statements the task moves."""

        async def fetch(self, text, *arguments):
            rows = await pool.fetch(text, *arguments)
            await History(settings, store).round()
            return rows

    other = Submission(type="t", context=Context.encode(1), idempotency_key="other")
    [known, new] = await tasks.submit(Moving(), [same, other])
    assert known == tasks.Submitted(first, created=False)
    assert new.created
    assert await moved(pool) == {first}
    [again] = await tasks.submit(pool, [same])
    assert again.created
    assert again.id != first


async def test_a_task_that_moves_while_it_is_read_is_shown_whole(pool, settings, store):
    """Scale: whichever statement of reading it falls between, a move neither hides the task nor its attempts."""
    for number in range(4):
        [task_id] = await ended(pool, 1, callback="delivered")
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
        assert await moved(pool) >= {task_id}


async def test_questions_about_many_tasks_find_those_in_history(pool, settings, store):
    """Scale: a watch counts what has moved, and what is cancelled too late is known to have ended."""
    old = await ended(pool, 3)
    young = await ended(pool, 2, days=1, state="failed")
    await History(settings, store).round()
    assert await tasks.states_of(pool, [*old, *young, 10**9]) == {"succeeded": 3, "failed": 2}
    assert await tasks.known(pool, [*old, *young, 10**9]) == {*old, *young}


async def test_what_comes_late_for_a_moved_task_changes_nothing(pool, settings, store):
    """W4, H10, C5: a result, a late one of an expired attempt, and the fate of a callback find nothing to change, and raise nothing."""
    [task_id] = await ended(pool, 1, callback="dead")
    await pool.execute("UPDATE attempt SET outcome = 'expired' WHERE task_id = $1", task_id)
    before = await document(pool, task_id)
    await History(settings, store).round()
    fence = Fence(task_id, 1, "start", 1)
    verdict = conclude(fence, Outcome.DONE)
    ending = advance.Ending(fence=fence, outcome=Outcome.DONE, verdict=verdict, worker="w")
    for late in (False, True):
        found = await advance.advance(pool, [ending], late=late)
        assert found.applied == set()
        assert not found.owed.events
    assert await advance.stages_of(pool, [fence]) == {}
    assert await advance.late_attempts(pool, [fence]) == {}
    assert await advance.cancel(pool, [task_id]) == ([], Owed())
    assert await document(pool, task_id) == before


@pytest.mark.slow
async def test_release_reads_the_same_with_finished_tasks_and_history(pool, settings, store):
    """Scale: 100,000 finished rows, before and after they have moved to history, change neither the plan of a release nor how
    many entries it reads; moving itself looks by its index alone."""
    await pool.execute(
        "INSERT INTO task (type, state, stage, content_type, context)"
        " SELECT 't', 'ready', 'start', 'json', 'null' FROM generate_series(1, 1000)"
    )
    connection = await connect(settings.postgres, "plans")
    tracked = False

    async def release():
        await pool.execute("VACUUM ANALYZE task")
        nodes = await plan(connection, "release.release", "t", 10, [], tracked)
        return entries(nodes), sorted((n["Node Type"], n.get("Index Name", "")) for n in nodes)

    alone = await release()
    assert alone[0]["task_ready"] == 10
    assert ("Index Only Scan", "task_ready") in alone[1]
    await pool.execute(
        "INSERT INTO task (type, state, stage, content_type, context, finished_at)"
        " SELECT 't', 'succeeded', 'start', 'json', 'null', now() - interval '20 days' + n * interval '1 second'"
        " FROM generate_series(1, 100000) AS n"
    )
    assert await release() == alone
    look = await plan(connection, "history.look", datetime(2000, 1, 1, tzinfo=UTC), 0, datetime.now(UTC), 500)
    assert entries(look) == {"task_finished": 500}
    assert "Index Only Scan" in [node["Node Type"] for node in look]
    assert await History(settings, store).round() is False
    assert await pool.fetchval("SELECT count(*) FROM history") == 100_000
    assert await release() == alone
    await connection.close()
