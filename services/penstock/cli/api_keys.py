"""The verbs about API keys.

They use PostgreSQL directly, because no gateway accepts a request before the first API key exists.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

import click

from penstock.cli.deployment import deployment_settings
from penstock.cli.gateway import without_empty
from penstock.cli.groups import Group
from penstock.cli.options import limit_option, postgres_options
from penstock.cli.output import moment, print_answer, print_document, print_list
from penstock.cli.param_types import Duration, Rate, Whole
from penstock.cli.serving import extra
from penstock.client.operations import local_user
from penstock.core.access import (
    EVERY_NAMESPACE,
    SECRET_BYTES,
    Role,
    digest_of,
    parse_namespaces,
    split_token,
    token_of,
)
from penstock.core.changes import difference
from penstock.errors import Conflict
from penstock.settings import Platform

T = TypeVar("T")

# The fewest characters of a secret that the user provides: as many as a generated secret has in
# base64.
_MIN_SECRET_LENGTH = math.ceil(SECRET_BYTES * 8 / 6)


@click.group(cls=Group)
def keys() -> None:
    """Creates, lists, rotates and revokes API keys, directly in PostgreSQL."""


@keys.command()
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    required=True,
    help="The role of the API key; docs/deploy/security.md lists the rights of each role.",
)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    default=(EVERY_NAMESPACE,),
    show_default=True,
    help="A namespace in which the API key is valid; `*` is every namespace. The option is repeatable.",
)
@click.option(
    "--expires",
    type=Duration(),
    metavar="TIME",
    help="The time until the API key expires, such as 90d. Default: it does not expire.",
)
@click.option(
    "--rate",
    type=Rate(),
    help="The most requests a second to one gateway, in place of the gateway's setting.",
)
@click.option(
    "--drawn",
    is_flag=True,
    help="Create the API key of PENSTOCK_API_KEY, which the deployment has generated; nothing changes if "
    "it exists.",
)
@postgres_options
def create(
    name: str,
    role: str,
    namespaces: tuple[str, ...],
    expires: timedelta | None,
    rate: float | None,
    *,
    drawn: bool,
    json_: bool,
    **options: Any,
) -> None:
    """Creates an API key and shows its secret, which is shown only once."""
    try:
        allowed = parse_namespaces(namespaces)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not name.strip() or "\0" in name or len(name) > 200:
        raise click.UsageError("NAME must have 1 to 200 characters")
    key_id, secret = _provided_key() if drawn else _generate_key()

    async def work(statements: Any, connection: Any) -> Mapping[str, Any]:
        for existing in await statements.list_keys(connection) if drawn else ():
            if existing["id"] == key_id:
                if existing["digest"] != digest_of(secret):
                    raise Conflict(f"API key {key_id} exists with another secret: generate another id too")
                return cast("Mapping[str, Any]", existing)
        row: Mapping[str, Any] = await statements.create(
            connection,
            key_id=key_id,
            digest=digest_of(secret),
            name=name,
            role=Role(role),
            namespaces=allowed,
            rate=rate,
            expires_at=await _expiry(statements, connection, expires),
        )
        await _audit(connection, "create", key_id, difference(None, _settings(row)))
        return row

    row = _run(options, work)
    if drawn:
        if (state := _document(row)["state"]) != "valid":
            raise Conflict(
                f"API key {key_id} is {state}: generate another one (`make .env` does where there is no .env), "
                "or unset PENSTOCK_API_KEY"
            )
        if not json_:
            click.echo(f"API key {key_id} ({row['name']}, {row['role']}) is valid", err=True)
            return
    _print_secret(row, token_of(key_id, secret), json_=json_)


@keys.command("list")
@postgres_options
def list_(*, json_: bool, **options: Any) -> None:
    """Lists all API keys, with expired and revoked ones, but without their secrets."""

    async def work(statements: Any, connection: Any) -> list[dict[str, Any]]:
        return [_document(row) for row in await statements.list_keys(connection)]

    print_list(
        _run(options, work),
        ("id", "name", "role", "namespaces", "state", "expires", "last used"),
        lambda document: (
            document["id"],
            document["name"],
            document["role"],
            " ".join(document["namespaces"]),
            document["state"],
            _moment_text(document["expires_at"]) or "never",
            _moment_text(document["last_used_at"]) or "never",
        ),
        "no API keys; create one with `penstock keys create NAME --role ROLE`",
        json_=json_,
    )


@keys.command()
@click.argument("id_", metavar="ID")
@click.option(
    "--overlap",
    type=Duration(),
    default="1d",
    show_default=True,
    metavar="TIME",
    help="The time for which the old API key stays valid.",
)
@click.option(
    "--expires",
    type=Duration(),
    metavar="TIME",
    help="The time until the new API key expires. Default: the time that the old one had.",
)
@postgres_options
def rotate(id_: str, overlap: timedelta, expires: timedelta | None, *, json_: bool, **options: Any) -> None:
    """Creates an API key that replaces another, and shows its secret, which is shown only once."""
    key_id, secret = _generate_key()

    async def work(statements: Any, connection: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        found: tuple[Mapping[str, Any], Mapping[str, Any]] = await statements.rotate(
            connection,
            id_,
            new_id=key_id,
            digest=digest_of(secret),
            overlap_s=overlap.total_seconds(),
            expires_at=await _expiry(statements, connection, expires),
        )
        new, old = found
        change = {"old": {"id": id_, **_settings(old)}, "new": {"id": key_id, **_settings(new)}}
        await _audit(connection, "rotate", id_, change)
        return found

    new, old = _run(options, work)
    _print_secret(new, token_of(key_id, secret), json_=json_)
    if not json_:
        click.echo(f"{id_} is valid until {_moment_text(old['expires_at'])}", err=True)


@keys.command()
@click.argument("id_", metavar="ID")
@postgres_options
def revoke(id_: str, *, json_: bool, **options: Any) -> None:
    """Revokes an API key; every gateway refuses it within seconds."""

    async def work(statements: Any, connection: Any) -> bool:
        changed = bool(await statements.revoke(connection, id_))
        if changed:
            await _audit(
                connection, "revoke", id_, {"before": {"revoked": False}, "after": {"revoked": True}}
            )
        return changed

    changed = _run(options, work)
    print_answer(
        {"id": id_, "changed": changed},
        f"{id_} is revoked" if changed else f"{id_} was revoked before",
        json_=json_,
    )


@keys.command("audit")
@click.option("--actor", metavar="WHO", help="List only requests of this actor: key:ID or oidc:SUBJECT.")
@limit_option("requests")
@click.option(
    "--before",
    type=Whole(1),
    metavar="SEQ",
    help="List only requests before this number of an earlier answer.",
)
@postgres_options
def audit_(actor: str | None, limit: int, before: int | None, *, json_: bool, **options: Any) -> None:
    """Lists audited requests, latest first: actor, path, status, address, and what was changed."""

    async def work(_statements: Any, connection: Any) -> list[dict[str, Any]]:
        from penstock.postgres import audit  # noqa: PLC0415 (optional packages)

        rows = await audit.find(connection, before=before, actor=actor, limit=limit)
        return [{**row, "change": json.loads(row["change"]) if row["change"] else None} for row in rows]

    print_list(
        _run(options, work),
        ("seq", "at", "actor", "request", "path", "status", "from", "change"),
        lambda document: (
            str(document["seq"]),
            _moment_text(document["at"]),
            document["actor"],
            document["route"],
            document["path"],
            str(document["status"]),
            document["remote"] or "",
            json.dumps(document["change"]) if document["change"] else "",
        ),
        "no such requests were audited",
        json_=json_,
    )


def _provided_key() -> tuple[str, str]:
    token = split_token(os.environ.get("PENSTOCK_API_KEY", "").strip())
    if token is None or len(token[1]) < _MIN_SECRET_LENGTH:
        raise click.UsageError(
            "PENSTOCK_API_KEY must be pk_ID_SECRET: ID is 16 hexadecimal digits and SECRET at least "
            f"{_MIN_SECRET_LENGTH} random characters, as `make .env` generates them"
        )
    return token


def _generate_key() -> tuple[str, str]:
    return secrets.token_hex(8), secrets.token_urlsafe(SECRET_BYTES)


def _moment_text(at: datetime | None) -> str:
    return moment(at.astimezone(UTC).isoformat()) if at else ""


async def _audit(connection: Any, verb: str, key_id: str, change: Mapping[str, Any]) -> None:
    from penstock.postgres import audit  # noqa: PLC0415 (optional packages)

    text = json.dumps(change)
    entry = (datetime.now(UTC), f"cli:{local_user()}", f"penstock keys {verb}", key_id, 200, None, text)
    await audit.write(connection, [entry])


async def _expiry(statements: Any, connection: Any, duration: timedelta | None) -> datetime | None:
    if duration is None:
        return None
    # By the database's clock, by which the key expires: this machine's may differ.
    at: datetime = await statements.now(connection)
    return at + duration


def _run(options: Mapping[str, Any], work: Callable[[Any, Any], Awaitable[T]]) -> T:
    with extra("services", "the verb `penstock keys`"):
        from penstock.postgres import api_keys  # noqa: PLC0415 (optional packages)
        from penstock.postgres.connection import close, connect  # noqa: PLC0415 (optional packages)

    async def run(dsn: str) -> T:
        connection = await connect(dsn, "keys")
        try:
            return await work(api_keys, connection)
        finally:
            await close(connection)

    with deployment_settings(Platform, without_empty(**options), "postgres") as settings:
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


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the audit keeps of an API key."""
    document = _document(row)
    names = ("name", "role", "namespaces", "rate")
    return {**{name: document[name] for name in names}, "expires_at": _moment_text(row["expires_at"])}


def _print_secret(row: Mapping[str, Any], token: str, *, json_: bool) -> None:
    if json_:
        print_document({**_document(row), "secret": token})
        return
    # Standard output has the secret alone, so that a pipe can carry it to a file or a vault.
    click.echo(token)
    click.echo(
        f"{row['id']} ({row['name']}, {row['role']}): this secret is shown only once; "
        "clients send it as PENSTOCK_API_KEY",
        err=True,
    )
