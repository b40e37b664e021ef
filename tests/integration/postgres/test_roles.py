"""Roles of services: PostgreSQL permits exactly the statements of the service.

PENSTOCK_WRITE_ROLES=1 pytest tests/integration/postgres/test_roles.py
rewrites the grants to services in schemas/postgres/roles.sql.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import uuid
from contextlib import AsyncExitStack
from itertools import groupby
from urllib.parse import parse_qs, urlsplit

import asyncpg
import click.testing
import pytest
from tests.support.callback_targets import SECRET, target_server
from tests.support.gateways import running_gateway
from tests.support.pipeline import System
from tests.support.query_rights import BEHIND_TRIGGERS, all_queries, needs, of_package
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

from penstock.callbacks.app import create_app as callbacks_app
from penstock.callbacks.settings import CallbacksSettings
from penstock.checks.app import check
from penstock.cli.main import cli
from penstock.contracts.files import schemas_folder
from penstock.errors import SettingsError
from penstock.flow_owner.app import create_app as flows_app
from penstock.flow_owner.settings import FlowsSettings
from penstock.kafka.topology import services
from penstock.objects import ObjectStore
from penstock.postgres import logins, roles
from penstock.postgres.connection import SESSION_SETTINGS, open_pool, translated
from penstock.postgres.types import TaskType, register
from penstock.settings import Platform
from penstock.task_sync.history import History
from penstock.task_sync.settings import TaskSyncSettings

FILE = schemas_folder() / "postgres" / "roles.sql"
# The package of each service, by the name of its role.
SERVICES = {name.replace("-", "_"): service.package for name, service in services.SERVICES.items()}
ORDER = ("SELECT", "INSERT", "UPDATE", "DELETE", "EXECUTE")
BEGIN, END = "-- begin: services (generated)\n", "-- end: services\n"

# Columns that the reader may not read, and the reason.
HIDDEN = {
    ("callback", "headers"): "secrets",
    ("task", "callbacks"): "have headers",
    ("task_type", "callbacks"): "have headers",
    ("history", "callbacks"): "have headers",
    ("flow", "callbacks"): "have headers",
    ("flow_history", "callbacks"): "have headers",
    ("schedule", "callbacks"): "have headers",
    ("api_key", "digest"): "of a secret",
    ("console_session", "digest"): "of a secret",
    ("callback_secret", "sealed"): "an encrypted secret",
}

# For each role one statement that only another role may execute; FOREIGN_TO_MOST for the rest.
FOREIGN = {
    "gateway": "DELETE FROM attempt",
    "task_sync": "UPDATE callback_target SET rate = 1",
    "heartbeats": "SELECT * FROM audit",
    "stages": "SELECT penstock.history_drop('2026-01-01', 1, false)",
    "flows": "SELECT digest FROM api_key",
    "callbacks": "UPDATE task SET state = 'succeeded'",
    "tasklogs": "DELETE FROM log_deletion USING task",
    "reader": "SELECT headers FROM callback",
}
FOREIGN_TO_MOST = "SELECT digest FROM api_key"


@pytest.fixture
async def admin(database):
    """A superuser's connection."""
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    yield connection
    await connection.close()


@pytest.fixture
async def prefix_of_roles(database, admin):
    """Creates roles with this test's own prefix, because roles belong to the server that tests
    share."""
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
    """Returns the URL, over TCP with a password, of a role that may log in."""
    parts = urlsplit(database)
    port = parts.port or int(parse_qs(parts.query).get("port", ["5432"])[0])
    return f"postgresql://{role}:right@{parts.hostname or '127.0.0.1'}:{port}{parts.path}"


async def allow_login(admin, database: str, prefix: str) -> dict[str, str]:
    """Lets each role log in and returns its URL by its short name."""
    for role in roles.role_names(prefix):
        await admin.execute(f"ALTER ROLE {role} LOGIN PASSWORD 'right'")
    return {role.removeprefix(prefix): url_of(database, role) for role in roles.role_names(prefix)}


def grants_of(rights: dict[str, set[tuple[str, str]]]) -> str:
    lines = []
    for service, found in rights.items():
        lines.append(f"GRANT USAGE ON SCHEMA penstock TO penstock_{service};")
        for granted_object, group in groupby(sorted(found), key=lambda right: right[0]):
            privileges = sorted((privilege for _, privilege in group), key=ORDER.index)
            lines.append(f"GRANT {', '.join(privileges)} ON {granted_object} TO penstock_{service};")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


async def test_services_have_exactly_the_rights_of_their_statements(admin):
    """S10: each service has exactly the rights that PostgreSQL requires for the statements its code
    can reach. The test fails when a statement needs another right, or a right is unused."""
    expected = grants_of(
        {service: await needs(admin, of_package(package)) for service, package in SERVICES.items()}
    )
    text = FILE.read_text()
    before, _, rest = text.partition(BEGIN)
    found, _, after = rest.partition(END)
    if os.environ.get("PENSTOCK_WRITE_ROLES"):
        FILE.write_text(before + BEGIN + expected + END + after)
        found = expected
    assert found == expected


def test_every_statement_is_used():
    """Every SQL statement is used by a service or by a command of the database's owner."""
    service_statements = set().union(*(of_package(name) for name in (*SERVICES.values(), "checks")))
    # Only the database's owner executes these, by `penstock migrate`, `roles` and `keys`.
    owner_statements = {
        name
        for name in all_queries()
        if name.startswith(("migrations.", "roles.", "api_keys.")) or name == "audit.list"
    }
    assert set(all_queries()) - service_statements - owner_statements == set()


async def test_every_trigger_is_listed(admin):
    """Each trigger that runs with the rights of its statement's role is listed in
    `tests.support.query_rights`, because a statement's plan does not show the rights of
    triggers."""
    rows = await admin.fetch(
        "SELECT tgrelid::regclass::text AS on, prosrc AS does FROM pg_trigger JOIN pg_proc p ON p.oid = tgfoid"
        " JOIN pg_class c ON c.oid = tgrelid WHERE NOT tgisinternal AND NOT p.prosecdef AND c.relnamespace = 'penstock'::regnamespace"
    )
    assert all("penstock.backlog_change" in row["does"] for row in rows)
    assert {row["on"] for row in rows} == set(BEHIND_TRIGGERS)


async def test_the_reader_sees_everything_but_secrets(admin):
    """S10: the reader may read every table and column, unless this file lists it with a reason."""
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
    whole_tables = {right.object for right in rights if not right.part}
    seen = {(table, part) for table, part in columns if table in whole_tables} | {
        (r.object, r.part) for r in rights if r.part
    }
    assert columns - seen == set(HIDDEN)
    assert seen <= columns


async def test_apply_grants_missing_rights_and_empties_the_plan(database, admin, prefix_of_roles):
    """S10: `apply` grants missing rights and reports additional ones, which it revokes only on
    request. A second plan is empty."""
    assert await roles.plan(database, prefix_of_roles) == roles.Plan((), ())
    stages = prefix_of_roles + "stages"
    await admin.execute(f"REVOKE UPDATE ON task FROM {stages}")
    await admin.execute(f"GRANT DELETE ON task TO {stages}")
    await admin.execute(f"GRANT SELECT (headers) ON callback TO {prefix_of_roles}reader")
    found = await roles.apply(database, prefix_of_roles)
    assert found.add == (f"GRANT UPDATE ON penstock.task TO {stages}",)
    excess = (
        f"REVOKE SELECT (headers) ON penstock.callback FROM {prefix_of_roles}reader",
        f"REVOKE DELETE ON penstock.task FROM {stages}",
    )
    assert found.revoke == excess
    assert await roles.plan(database, prefix_of_roles) == roles.Plan((), excess)
    await roles.apply(database, prefix_of_roles, revoke=True)
    assert await roles.plan(database, prefix_of_roles) == roles.Plan((), ())


async def test_apply_revokes_public_rights_after_a_restore(database, admin, prefix_of_roles):
    """S10: `apply` revokes PUBLIC's right to execute functions with their owner's rights, which a
    restore without privileges grants."""
    revoke_from_public = "REVOKE EXECUTE ON FUNCTION penstock.history_open(day date) FROM PUBLIC"
    await admin.execute("GRANT EXECUTE ON FUNCTION history_open(date) TO PUBLIC")
    found = await roles.apply(database, prefix_of_roles)
    assert [re.sub(r"\(.*\)", "", line) for line in found.add] == [re.sub(r"\(.*\)", "", revoke_from_public)]
    assert await roles.plan(database, prefix_of_roles) == roles.Plan((), ())


async def test_roles_have_the_settings_of_a_session(database, admin, prefix_of_roles):
    """Each role has the settings of a session, because a pooler does not pass on a connection's
    settings."""
    urls = await allow_login(admin, database, prefix_of_roles)
    for url in urls.values():
        connection = await asyncpg.connect(url)
        try:
            for name, value in SESSION_SETTINGS.items():
                assert await connection.fetchval(f"SHOW {name}") == value
        finally:
            await connection.close()


@pytest.mark.parametrize("role", sorted({*SERVICES, *FOREIGN}))
async def test_a_role_is_refused_another_roles_statement(role, database, admin, prefix_of_roles):
    """S10: PostgreSQL refuses each role another role's statement and the creation of a table."""
    urls = await allow_login(admin, database, prefix_of_roles)
    async with open_pool(urls[role], "test") as pool:
        with pytest.raises(SettingsError, match="permission denied"), translated():
            await pool.execute(FOREIGN.get(role, FOREIGN_TO_MOST))
        with pytest.raises(SettingsError, match="permission denied"), translated():
            await pool.execute("CREATE TABLE penstock.own ()")


async def test_a_task_succeeds_with_a_role_for_each_service(
    kafka_servers, prefix, database, admin, prefix_of_roles, tmp_path
):
    """S10: with only these rights, tasks succeed with a lease, a callback and history, a flow
    advances, and the check runs as the reader."""
    urls = await allow_login(admin, database, prefix_of_roles)
    connection_settings = {"kafka": kafka_servers, "prefix": prefix, "objects": f"file://{tmp_path}"}
    await make_topics(kafka_servers, prefix)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_server())
        gateway = await stack.enter_async_context(
            running_gateway(**connection_settings, postgres=urls["gateway"])
        )
        async with open_pool(urls["gateway"], "test") as pool:
            await register(pool, TaskType(name="t", partitions=2, max_in_flight=50))
        system = System(kafka_servers, prefix, database, stack, admin)
        for name in ("task-sync", "heartbeats", "stages"):
            system.database = urls[name.replace("-", "_")]
            await system.start(name)
        settings = CallbacksSettings.load(
            {},
            **connection_settings,
            postgres=urls["callbacks"],
            callback_secrets=(SECRET,),
            callback_allow=("127.0.0.1",),
        )
        await stack.enter_async_context(running_service(callbacks_app(settings)))
        flows_settings = FlowsSettings.load({}, **connection_settings, postgres=urls["flows"])
        await stack.enter_async_context(running_service(flows_app(flows_settings)))
        await system.work(handler_s=1.5)
        answer = await gateway.post(
            "/tasks", [{"type": "t", "context": n, "callbacks": [f"{target.url}/hook"]} for n in range(3)]
        )
        assert answer.status == 201, answer.body
        await system.become(running=3)
        await system.become(succeeded=3)
        await wait_until(lambda: len(target.calls) >= 3, what="callbacks are received")
        await wait_until(lambda: all_delivered(admin), what="outcomes of callbacks are written")
        nodes = {
            "ready": {"kind": "wait", "event": "ready"},
            "run": {
                "kind": "map",
                "after": ["ready"],
                "items": "[1, 2]",
                "each": {"kind": "task", "type": "t"},
            },
        }
        for path, body in (
            ("/flow-definitions", {"flow": "f", "version": 1, "nodes": nodes}),
            ("/flows", {"flow": "f"}),
            ("/events/ready", {"id": "1"}),
        ):
            answer = await gateway.post(path, body)
            assert answer.status in (200, 201), answer.body
        await wait_until(
            lambda: admin.fetchval("SELECT status = 'succeeded' FROM flow"), what="the flow succeeds"
        )
        found = await check(Platform(**connection_settings, postgres=urls["reader"]))
        assert found.clean, found
        # Functions that only task-sync may call create and drop the partitions of days.
        await admin.execute("UPDATE task SET finished_at = finished_at - interval '40 days'")
        history_settings = TaskSyncSettings.load(
            {}, **connection_settings, postgres=urls["task_sync"], history_retain_days=30.0
        )
        history = History(history_settings, ObjectStore(history_settings.objects))
        await history.round()
        await history.round()
        assert (history.moved, history.dropped) == (3, 1)
    environment = {"PENSTOCK_POSTGRES": urls["reader"]}
    runner = click.testing.CliRunner(env=environment)
    listed = await asyncio.to_thread(runner.invoke, cli, ["history", "list", "--all", "--json"])
    assert json.loads(listed.output)["tasks"] == 3


async def all_delivered(admin) -> bool:
    return await admin.fetchval("SELECT count(*) FROM callback WHERE state <> 'delivered'") == 0


def test_the_script_grants_the_declared_rights():
    """`penstock roles sql` prints all statements that `apply` executes."""
    found = click.testing.CliRunner().invoke(
        cli, ["roles", "sql", "--database", 'odd"name', "--role-prefix", "x_"]
    )
    assert found.exit_code == 0, found.output
    assert 'ALTER ROLE x_stages IN DATABASE "odd""name" SET search_path = penstock;' in found.output
    assert "GRANT USAGE ON SCHEMA penstock TO x_stages;" in found.output
    assert "penstock_" not in found.output


async def test_a_superuser_makes_the_logins_and_the_owner_does_the_rest(
    postgres_server, admin, monkeypatch, tmp_path
):
    """O5: `penstock roles login` on an empty database creates the roles and an owner, with
    passwords of which the server gets verifiers. As the owner, who is no superuser, `penstock
    migrate --roles` creates tables and grants rights; a service can then log in and works. A second
    run changes passwords only."""
    name = f"t_{uuid.uuid4().hex[:10]}"
    prefix, owner = f"{name}_", f"{name}-Owner"
    await admin.execute(f"CREATE DATABASE {name}")
    for variable in list(os.environ):
        if variable.startswith("PENSTOCK_PASSWORD_"):
            monkeypatch.delenv(variable)
    for service in ("OWNER", "GATEWAY", "TASK_SYNC"):
        monkeypatch.setenv(f"PENSTOCK_PASSWORD_{service}", "right")
    monkeypatch.chdir(tmp_path)
    superuser = urlsplit(postgres_server)._replace(path=f"/{name}").geturl()

    async def invoke(*arguments: str, postgres: str) -> str:
        verb = [*arguments, "--role-prefix", prefix, "--postgres", postgres]
        done = await asyncio.to_thread(click.testing.CliRunner().invoke, cli, verb)
        assert done.exit_code == 0, done.output
        return done.stdout

    try:
        made = await invoke("roles", "login", "--owner", owner, postgres=superuser)
        assert f"CREATE ROLE {prefix}stages NOLOGIN;" in made
        assert f"ALTER ROLE {prefix}gateway LOGIN PASSWORD '…';" in made
        assert "right" not in made.replace("…", "")
        owner_url = url_of(superuser, owner)
        await invoke("migrate", "--roles", postgres=owner_url)
        assert "as declared" in await invoke("roles", "plan", postgres=owner_url)
        gateway = await asyncpg.connect(url_of(superuser, f"{prefix}gateway"))
        assert await gateway.fetchval("SELECT count(*) FROM task") == 0
        await gateway.close()
        connection = await asyncpg.connect(superuser)
        rows = await connection.fetch(
            "SELECT rolname, rolcanlogin, rolsuper OR rolcreaterole OR rolcreatedb AS high FROM pg_roles"
            " WHERE starts_with(rolname, $1)",
            name,
        )
        owners = await connection.fetch(
            "SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'penstock'"
        )
        stored = await connection.fetchval(
            "SELECT rolpassword FROM pg_authid WHERE rolname = $1", f"{prefix}gateway"
        )
        await connection.close()
        assert [row["tableowner"] for row in owners] == [owner]
        assert not [row["rolname"] for row in rows if row["high"]]
        can_log_in = {row["rolname"] for row in rows if row["rolcanlogin"]}
        assert can_log_in == {owner, f"{prefix}gateway", f"{prefix}task_sync"}
        assert stored.startswith("SCRAM-SHA-256$4096:")

        monkeypatch.setenv("PENSTOCK_PASSWORD_GATEWAY", "renewed")
        again = await invoke("roles", "login", "--owner", owner, postgres=superuser)
        assert "CREATE ROLE" not in again
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(url_of(superuser, f"{prefix}gateway"))
        await (
            await asyncpg.connect(url_of(superuser, f"{prefix}gateway").replace("right", "renewed"))
        ).close()
    finally:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        for row in await admin.fetch(
            "SELECT quote_ident(rolname) AS role FROM pg_roles WHERE starts_with(rolname, $1)", name
        ):
            await admin.execute(f"DROP ROLE {row['role']}")


async def test_the_user_of_the_connection_keeps_its_password(database, admin, prefix_of_roles):
    """O5: where the superuser is the owner, `roles login` leaves its password alone."""
    user = await admin.fetchval("SELECT current_user")
    stored = "SELECT rolpassword FROM pg_authid WHERE rolname = $1"
    before = await admin.fetchval(stored, user)
    done = await logins.apply(database, {user: "another"}, bytes, prefix=prefix_of_roles, owner=user)
    assert await admin.fetchval(stored, user) == before
    assert not [statement for statement in done if "PASSWORD" in statement or "CREATE ROLE" in statement]
