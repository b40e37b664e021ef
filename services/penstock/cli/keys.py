"""The verbs about keys of the API. They go to PostgreSQL and not to a gateway: the first key is made before any is accepted."""

from __future__ import annotations

import asyncio
import math
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

import click

from penstock.cli.deployment import Found, data_dir_option
from penstock.cli.gateway import without_nothing
from penstock.cli.numbers import Pace, Whole
from penstock.cli.output import as_json, console, moment, print_json, table
from penstock.cli.serving import extra, postgres_option
from penstock.client.operating import myself
from penstock.core.access import (
    EVERY_NAMESPACE,
    SECRET_BYTES,
    Role,
    digest_of,
    namespaces_in,
    split,
    token_of,
)
from penstock.errors import Conflict
from penstock.settings import Platform

T = TypeVar("T")

_LATEST = 20
# Characters of a secret that somebody else has drawn: as many as our own have, in base64.
_LEAST = math.ceil(SECRET_BYTES * 8 / 6)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9})([smhd])")


class Duration(click.ParamType):
    """Seconds, minutes, hours or days: `90d`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """The time that a text names."""
        if isinstance(value, timedelta):
            return value
        found = _DURATION.fullmatch(value)
        if not found:
            self.fail(f"{value!r} is no time such as 30m, 12h or 90d.", param, ctx)
        try:
            span = timedelta(seconds=int(found[1]) * _UNITS[found[2]])
            # There must be such a moment.
            _ = datetime.now(UTC) + span
        except OverflowError:
            self.fail(f"{value!r} is too long.", param, ctx)
        if not span:
            self.fail(f"{value!r} is over before it begins.", param, ctx)
        return span


@click.group()
def keys() -> None:
    """API keys of gateways: creates, lists, rotates and revokes them, in PostgreSQL itself."""


@keys.command()
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    required=True,
    help="What it is for: docs/deploy/security.md says what each may do.",
)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    default=(EVERY_NAMESPACE,),
    show_default=True,
    help="Where it may do that; repeatable. `*` is everywhere.",
)
@click.option("--expires", type=Duration(), metavar="TIME", help="Refused after so long, such as 90d.")
@click.option("--rate", type=Pace(), help="Requests a second of one gateway, in place of its setting.")
@click.option(
    "--drawn",
    is_flag=True,
    help="The key is the one in PENSTOCK_API_KEY, drawn by whoever deploys; nothing changes when it is there.",
)
@postgres_option
@data_dir_option
@as_json
def create(
    name: str,
    role: str,
    namespaces: tuple[str, ...],
    expires: timedelta | None,
    rate: float | None,
    *,
    drawn: bool,
    json_: bool,
    **given: Any,
) -> None:
    """Creates a key and shows its secret, this once."""
    try:
        where = namespaces_in(namespaces)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not name.strip() or "\0" in name or len(name) > 200:
        raise click.UsageError("NAME is 1 to 200 characters")
    key_id, secret = _given() if drawn else _drawn()

    async def work(rows: Any, connection: Any) -> Mapping[str, Any]:
        for there in await rows.all_keys(connection) if drawn else ():
            if there["id"] == key_id:
                if there["digest"] != digest_of(secret):
                    raise Conflict(f"key {key_id} is there with another secret: draw another id too")
                return cast("Mapping[str, Any]", there)
        row: Mapping[str, Any] = await rows.create(
            connection,
            key_id=key_id,
            digest=digest_of(secret),
            name=name,
            role=Role(role),
            namespaces=where,
            rate=rate,
            expires_at=_until(expires),
        )
        await _note(connection, "create", key_id)
        return row

    row = _asked(given, work)
    if drawn:
        if (state := _document(row)["state"]) != "valid":
            raise Conflict(
                f"key {key_id} is {state}: draw another (`make .env` where there is none), or unset PENSTOCK_API_KEY"
            )
        if not json_:
            click.echo(f"key {key_id} ({row['name']}, {row['role']}) is valid", err=True)
            return
    _tell(row, token_of(key_id, secret), json_=json_)


@keys.command("list")
@postgres_option
@data_dir_option
@as_json
def list_(*, json_: bool, **given: Any) -> None:
    """Lists all keys, also those that hold no more; never their secrets."""

    async def work(rows: Any, connection: Any) -> list[dict[str, Any]]:
        return [_document(row) for row in await rows.all_keys(connection)]

    found = _asked(given, work)
    if json_:
        for one in found:
            print_json(one)
    elif found:
        table(
            ("id", "name", "role", "namespaces", "state", "expires", "last used"),
            (
                (
                    one["id"],
                    one["name"],
                    one["role"],
                    " ".join(one["namespaces"]),
                    one["state"],
                    _shown(one["expires_at"]) or "never",
                    _shown(one["last_used_at"]) or "never",
                )
                for one in found
            ),
        )
    else:
        console().print("no API keys; create one with `penstock keys create NAME --role ROLE`")


@keys.command()
@click.argument("id_", metavar="ID")
@click.option(
    "--overlap",
    type=Duration(),
    default="1d",
    show_default=True,
    metavar="TIME",
    help="For how long the old one holds beside the new one.",
)
@click.option(
    "--expires",
    type=Duration(),
    metavar="TIME",
    help="Of the new one. Default: as long as the old one was made for.",
)
@postgres_option
@data_dir_option
@as_json
def rotate(id_: str, overlap: timedelta, expires: timedelta | None, *, json_: bool, **given: Any) -> None:
    """Creates a key that takes the place of another, and shows its secret, this once."""
    key_id, secret = _drawn()

    async def work(rows: Any, connection: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        found: tuple[Mapping[str, Any], Mapping[str, Any]] = await rows.rotate(
            connection,
            id_,
            new_id=key_id,
            digest=digest_of(secret),
            overlap_s=overlap.total_seconds(),
            expires_at=_until(expires),
        )
        await _note(connection, "rotate", id_)
        return found

    new, old = _asked(given, work)
    _tell(new, token_of(key_id, secret), json_=json_)
    if not json_:
        click.echo(f"{id_} holds until {_shown(old['expires_at'])}", err=True)


@keys.command()
@click.argument("id_", metavar="ID")
@postgres_option
@data_dir_option
@as_json
def revoke(id_: str, *, json_: bool, **given: Any) -> None:
    """Refuses a key from now on: every gateway hears of it within seconds."""

    async def work(rows: Any, connection: Any) -> bool:
        changed = bool(await rows.revoke(connection, id_))
        if changed:
            await _note(connection, "revoke", id_)
        return changed

    changed = _asked(given, work)
    if json_:
        print_json({"id": id_, "changed": changed})
    else:
        click.echo(f"{id_} is revoked" if changed else f"{id_} was revoked before")


@keys.command("audit")
@click.option("--actor", metavar="WHO", help="Only of this one: key:ID or oidc:SUBJECT.")
@click.option("--limit", type=Whole(1), default=_LATEST, show_default=True, help="Most requests.")
@click.option(
    "--before", type=Whole(1), metavar="SEQ", help="Only those before this one, of an earlier answer."
)
@postgres_option
@data_dir_option
@as_json
def audit_(actor: str | None, limit: int, before: int | None, *, json_: bool, **given: Any) -> None:
    """Lists requests that could change something, latest first: who asked, for what, from where, and the answer."""

    async def work(_rows: Any, connection: Any) -> list[dict[str, Any]]:
        from penstock.postgres import audit  # noqa: PLC0415 (optional packages)

        return [dict(row) for row in await audit.find(connection, before=before, actor=actor, limit=limit)]

    found = _asked(given, work)
    if json_:
        for one in found:
            print_json(one)
    elif found:
        table(
            ("seq", "at", "actor", "request", "path", "status", "from"),
            (
                (
                    str(one["seq"]),
                    _shown(one["at"]),
                    one["actor"],
                    one["route"],
                    one["path"],
                    str(one["status"]),
                    one["remote"] or "",
                )
                for one in found
            ),
        )
    else:
        console().print("no such requests were noted")


def _given() -> tuple[str, str]:
    found = split(os.environ.get("PENSTOCK_API_KEY", "").strip())
    if found is None or len(found[1]) < _LEAST:
        raise click.UsageError(
            "PENSTOCK_API_KEY must be pk_ID_SECRET: ID is 16 hexadecimal digits and SECRET at least "
            f"{_LEAST} random characters, as `make .env` draws them"
        )
    return found


def _drawn() -> tuple[str, str]:
    return secrets.token_hex(8), secrets.token_urlsafe(SECRET_BYTES)


def _shown(at: datetime | None) -> str:
    return moment(at.astimezone(UTC).isoformat()) if at else ""


async def _note(connection: Any, verb: str, key_id: str) -> None:
    from penstock.postgres import audit  # noqa: PLC0415 (optional packages)

    entry = (datetime.now(UTC), f"cli:{myself()}", f"penstock keys {verb}", key_id, 200, None)
    await audit.write(connection, [entry])


def _until(span: timedelta | None) -> datetime | None:
    return None if span is None else datetime.now(UTC) + span


def _asked(given: Mapping[str, Any], work: Callable[[Any, Any], Awaitable[T]]) -> T:
    with extra("services", "the keys"):
        from penstock.postgres import api_keys  # noqa: PLC0415 (optional packages)
        from penstock.postgres.connection import connect  # noqa: PLC0415 (optional packages)

    async def run(dsn: str) -> T:
        connection = await connect(dsn, "keys")
        try:
            return await work(api_keys, connection)
        finally:
            await connection.close()

    with Found(Platform, without_nothing(**given)).telling("postgres") as settings:
        return asyncio.run(run(settings.sessions))


def _document(row: Mapping[str, Any]) -> dict[str, Any]:
    from penstock.postgres.api_keys import state_of  # noqa: PLC0415 (optional packages)

    same = (
        "id",
        "name",
        "role",
        "rate",
        "created_at",
        "expires_at",
        "revoked_at",
        "last_used_at",
        "replaced_by",
    )
    return {
        **{name: row[name] for name in same},
        "namespaces": [EVERY_NAMESPACE] if row["namespaces"] is None else row["namespaces"],
        "state": state_of(row, datetime.now(UTC)),
    }


def _tell(row: Mapping[str, Any], token: str, *, json_: bool) -> None:
    if json_:
        print_json({**_document(row), "secret": token})
        return
    # Alone on standard output, so that it can be piped into a file or a vault.
    click.echo(token)
    click.echo(
        f"{row['id']} ({row['name']}, {row['role']}): this secret is shown once; clients send it as PENSTOCK_API_KEY",
        err=True,
    )
