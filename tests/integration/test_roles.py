"""A role for each service: its statements are permitted, and nothing else is.

PENSTOCK_WRITE_ROLES=1 pytest tests/integration/test_roles.py    renews what schemas/postgres/roles.sql grants to services.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from contextlib import AsyncExitStack
from itertools import groupby
from urllib.parse import parse_qs, urlsplit

import asyncpg
import click.testing
import pytest
from tests.callback_targets import SECRET, target_server
from tests.gateways import running_gateway
from tests.running import make_topics, running_service
from tests.statements import BEHIND_TRIGGERS, all_queries, needs, of_package
from tests.system import System
from tests.waiting import wait_until

from penstock.callbacks.app import create_app as callbacks_app
from penstock.callbacks.settings import CallbacksSettings
from penstock.checks.app import check
from penstock.cli.main import cli
from penstock.contracts.files import schemas_folder
from penstock.errors import SettingsError
from penstock.objects import ObjectStore
from penstock.postgres import roles
from penstock.postgres.connection import SESSION_SETTINGS, open_pool, translated
from penstock.postgres.types import TaskType, register
from penstock.settings import Platform
from penstock.task_sync.history import History
from penstock.task_sync.settings import TaskSyncSettings

FILE = schemas_folder() / "postgres" / "roles.sql"
SERVICES = ("gateway", "task_sync", "heartbeats", "stages", "callbacks")
ORDER = ("SELECT", "INSERT", "UPDATE", "DELETE", "EXECUTE")
BEGIN, END = "-- begin: services (generated)\n", "-- end: services\n"

# What the reader does not see, and why.
HIDDEN = {
    ("callback", "headers"): "secrets",
    ("task", "callbacks"): "have headers",
    ("task_type", "callbacks"): "have headers",
    ("history", "callbacks"): "have headers",
    ("api_key", "digest"): "of a secret",
}

# Of each role one statement that is another's to make.
FOREIGN = {
    "gateway": "DELETE FROM attempt",
    "task_sync": "UPDATE callback_target SET rate = 1",
    "heartbeats": "SELECT * FROM audit",
    "stages": "SELECT penstock.history_drop('2026-01-01', 1, false)",
    "callbacks": "UPDATE task SET state = 'succeeded'",
    "reader": "SELECT headers FROM callback",
}


@pytest.fixture
async def admin(database):
    """A superuser's connection."""
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    yield connection
    await connection.close()


@pytest.fixture
async def prefix_of_roles(database, admin):
    """Roles belong to the server, which other tests share: so their names are this test's own."""
    prefix = urlsplit(database).path[1:] + "_"
    await roles.apply(database, prefix)
    yield prefix
    names = [
        row["rolname"]
        for row in await admin.fetch("SELECT rolname FROM pg_roles WHERE starts_with(rolname, $1)", prefix)
    ]
    for name in names:
        await admin.execute(f"DROP OWNED BY {name}")
        await admin.execute(f"DROP ROLE {name}")


def url_of(database: str, role: str) -> str:
    """Of a role that has been let in, by TCP with a password."""
    parts = urlsplit(database)
    port = parts.port or int(parse_qs(parts.query).get("port", ["5432"])[0])
    return f"postgresql://{role}:right@{parts.hostname or '127.0.0.1'}:{port}{parts.path}"


async def let_in(admin, database: str, prefix: str) -> dict[str, str]:
    """The URL of each role by its short name."""
    for role in roles.role_names(prefix):
        await admin.execute(f"ALTER ROLE {role} LOGIN PASSWORD 'right'")
    return {role.removeprefix(prefix): url_of(database, role) for role in roles.role_names(prefix)}


def in_words(rights: dict[str, set[tuple[str, str]]]) -> str:
    lines = []
    for service, found in rights.items():
        lines.append(f"GRANT USAGE ON SCHEMA penstock TO penstock_{service};")
        for thing, group in groupby(sorted(found), key=lambda right: right[0]):
            privileges = sorted((privilege for _, privilege in group), key=ORDER.index)
            lines.append(f"GRANT {', '.join(privileges)} ON {thing} TO penstock_{service};")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


async def test_services_have_what_their_statements_need_and_no_more(admin):
    """S10: the rights are those that PostgreSQL asks for the statements a service's code can reach: a new statement that
    needs another right, or a right that no statement needs any more, fails here."""
    wanted = in_words({service: await needs(admin, of_package(service)) for service in SERVICES})
    text = FILE.read_text()
    before, _, rest = text.partition(BEGIN)
    found, _, after = rest.partition(END)
    if os.environ.get("PENSTOCK_WRITE_ROLES"):
        FILE.write_text(before + BEGIN + wanted + END + after)
        found = wanted
    assert found == wanted


def test_every_statement_is_some_services():
    """A statement that nobody is known to make has been overlooked, or is left over."""
    made = set().union(*(of_package(name) for name in (*SERVICES, "checks")))
    # Made by whoever owns the database: penstock migrate, roles and keys.
    own = {
        name
        for name in all_queries()
        if name.startswith(("migrations.", "roles.", "api_keys.")) or name == "audit.list"
    }
    assert set(all_queries()) - made - own == set()


async def test_triggers_are_those_known_here(admin):
    """What a trigger does is not seen when a statement is planned: each must be known to `tests.statements`."""
    rows = await admin.fetch(
        "SELECT tgrelid::regclass::text AS on, prosrc AS does FROM pg_trigger JOIN pg_proc p ON p.oid = tgfoid"
        " JOIN pg_class c ON c.oid = tgrelid WHERE NOT tgisinternal AND c.relnamespace = 'penstock'::regnamespace"
    )
    assert {row["on"] for row in rows} == set(BEHIND_TRIGGERS)
    assert all(row["does"].count("penstock.backlog_change") == 1 for row in rows)


async def test_the_reader_sees_everything_but_secrets(admin):
    """S10: a table or column that is new is granted to the reader, or named here with the reason why not."""
    columns = {
        (row["thing"], row["part"])
        for row in await admin.fetch(
            "SELECT c.relname AS thing, a.attname AS part FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
            " WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition"
            " AND a.attnum > 0 AND NOT a.attisdropped"
        )
    }
    rights = [right for right in roles.declared() if right.role == "penstock_reader"]
    assert {right.privilege for right in rights} == {"SELECT", "USAGE"}
    whole = {right.object for right in rights if not right.part}
    seen = {(thing, part) for thing, part in columns if thing in whole} | {
        (r.object, r.part) for r in rights if r.part
    }
    assert columns - seen == set(HIDDEN)
    assert seen <= columns


async def test_a_plan_is_what_lacks_and_is_empty_once_it_is_applied(database, admin, prefix_of_roles):
    """S10: applied twice, nothing is left; what was taken away is given again, what was added is told, and taken away only
    when that is asked for."""
    assert await roles.plan(database, prefix_of_roles) == roles.Plan((), ())
    stages = prefix_of_roles + "stages"
    await admin.execute(f"REVOKE UPDATE ON task FROM {stages}")
    await admin.execute(f"GRANT DELETE ON task TO {stages}")
    await admin.execute(f"GRANT SELECT (headers) ON callback TO {prefix_of_roles}reader")
    found = await roles.apply(database, prefix_of_roles)
    assert found.add == (f"GRANT UPDATE ON penstock.task TO {stages}",)
    beyond = (
        f"REVOKE SELECT (headers) ON penstock.callback FROM {prefix_of_roles}reader",
        f"REVOKE DELETE ON penstock.task FROM {stages}",
    )
    assert found.revoke == beyond
    assert await roles.plan(database, prefix_of_roles) == roles.Plan((), beyond)
    await roles.apply(database, prefix_of_roles, revoke=True)
    assert await roles.plan(database, prefix_of_roles) == roles.Plan((), ())


async def test_what_nobody_may_call_is_closed_also_after_a_restore(database, admin, prefix_of_roles):
    """S10: functions with their owner's rights are for those who are granted them, also where a restore without privileges has
    opened them to everybody."""
    everybodys = "REVOKE EXECUTE ON FUNCTION penstock.history_open(day date) FROM PUBLIC"
    await admin.execute("GRANT EXECUTE ON FUNCTION history_open(date) TO PUBLIC")
    found = await roles.apply(database, prefix_of_roles)
    assert [re.sub(r"\(.*\)", "", line) for line in found.add] == [re.sub(r"\(.*\)", "", everybodys)]
    assert await roles.plan(database, prefix_of_roles) == roles.Plan((), ())


async def test_roles_have_the_settings_of_a_session(database, admin, prefix_of_roles):
    """What a connection asks for at its start a role has by itself, for it may come by a pooler that passes nothing on."""
    urls = await let_in(admin, database, prefix_of_roles)
    for url in urls.values():
        connection = await asyncpg.connect(url)
        try:
            for name, value in SESSION_SETTINGS.items():
                assert await connection.fetchval(f"SHOW {name}") == value
        finally:
            await connection.close()


@pytest.mark.parametrize("role", sorted(FOREIGN))
async def test_what_is_anothers_is_refused(role, database, admin, prefix_of_roles):
    """S10: each role has a statement that PostgreSQL refuses it, by name of the table; so has whoever wants to migrate."""
    urls = await let_in(admin, database, prefix_of_roles)
    async with open_pool(urls[role], "test") as pool:
        with pytest.raises(SettingsError, match="permission denied"), translated():
            await pool.execute(FOREIGN[role])
        with pytest.raises(SettingsError, match="permission denied"), translated():
            await pool.execute("CREATE TABLE penstock.own ()")


async def test_a_task_passes_through_services_each_by_its_own_role(
    kafka_servers, prefix, database, admin, prefix_of_roles, tmp_path
):
    """S10: from submission by HTTP and by topic through a lease that is written, a callback and history to the end, with no
    more than these rights; the check runs as the reader."""
    urls = await let_in(admin, database, prefix_of_roles)
    where = {"kafka": kafka_servers, "prefix": prefix, "objects": f"file://{tmp_path}"}
    await make_topics(kafka_servers, prefix)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_server())
        gateway = await stack.enter_async_context(running_gateway(**where, postgres=urls["gateway"]))
        async with open_pool(urls["gateway"], "test") as pool:
            await register(pool, TaskType(name="t", partitions=2, max_in_flight=50))
        system = System(kafka_servers, prefix, database, stack, admin)
        for name in ("task-sync", "heartbeats", "stages"):
            system.database = urls[name.replace("-", "_")]
            await system.start(name)
        settings = CallbacksSettings.load(
            {}, **where, postgres=urls["callbacks"], callback_secrets=(SECRET,), callback_allow=("127.0.0.1",)
        )
        await stack.enter_async_context(running_service(callbacks_app(settings)))
        await system.work(handler_s=1.5)
        answer = await gateway.post(
            "/tasks", [{"type": "t", "context": n, "callbacks": [f"{target.url}/hook"]} for n in range(3)]
        )
        assert answer.status == 201, answer.body
        await system.become(running=3)
        await system.become(succeeded=3)
        await wait_until(lambda: len(target.calls) >= 3, what="callbacks are received")
        await wait_until(lambda: all_delivered(admin), what="fates are written")
        found = await check(Platform(**where, postgres=urls["reader"]))
        assert found.clean, found
        # Days are opened and dropped by functions that nobody else may call.
        await admin.execute("UPDATE task SET finished_at = finished_at - interval '40 days'")
        keeping = TaskSyncSettings.load({}, **where, postgres=urls["task_sync"], history_retain_days=30.0)
        moving = History(keeping, ObjectStore(keeping.objects))
        await moving.round()
        await moving.round()
        assert (moving.moved, moving.dropped) == (3, 1)
    environment = {"PENSTOCK_POSTGRES": urls["reader"]}
    runner = click.testing.CliRunner(env=environment)
    listed = await asyncio.to_thread(runner.invoke, cli, ["history", "list", "--all", "--json"])
    assert json.loads(listed.output)["tasks"] == 3


async def all_delivered(admin) -> bool:
    return await admin.fetchval("SELECT count(*) FROM callback WHERE state <> 'delivered'") == 0


def test_the_script_is_the_declaration():
    """`penstock roles sql` gives whoever may not let the program do it all that `apply` does."""
    found = click.testing.CliRunner().invoke(
        cli, ["roles", "sql", "--database", 'odd"name', "--role-prefix", "x_"]
    )
    assert found.exit_code == 0, found.output
    assert 'ALTER ROLE x_stages IN DATABASE "odd""name" SET search_path = penstock;' in found.output
    assert "GRANT USAGE ON SCHEMA penstock TO x_stages;" in found.output
    assert "penstock_" not in found.output
