"""The verbs about the secrets that sign callbacks: create, list, rotate, revoke, reencrypt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO

import click

from penstock.cli.gateway import client_options, gateway_option, open_client, without_empty
from penstock.cli.groups import Group
from penstock.cli.names import TARGET_URL
from penstock.cli.options import json_option, limit_option, together
from penstock.cli.output import console, moment, print_answer, print_document, print_list
from penstock.cli.param_types import Duration
from penstock.client import SyncClient
from penstock.core.access import EVERY_NAMESPACE
from penstock.errors import InvalidRecord


def _content(_ctx: click.Context, _option: click.Parameter, file: TextIO | None) -> str | None:
    if file is None:
        return None
    try:
        with file:
            return file.read().strip()
    except UnicodeDecodeError as error:
        # The message must not quote a secret.
        raise InvalidRecord("--secret-file is not UTF-8: save the file as UTF-8") from error


_namespace_option = click.option(
    "--namespace",
    metavar="NAME",
    help="The namespace of the targets. Default: the only namespace of the API key, or else `default`.",
)
_secret_options = together(
    click.option(
        "--secret-file",
        "secret",
        type=click.File(encoding="utf-8-sig"),
        callback=_content,
        help="A file with a secret of your own, `-` for standard input, so that no list of processes shows it.",
    ),
    click.option(
        "--reference",
        metavar="REF",
        help="Where the callbacks service finds the secret: env:NAME is its variable PENSTOCK_SECRET_NAME, file:NAME a "
        "file in its PENSTOCK_CALLBACK_SECRETS_DIR.",
    ),
    click.option("--public-key", metavar="KEY", help="The public key (whpk_…) of a v1a secret by reference."),
)


@click.group(cls=Group)
def secrets() -> None:
    """Creates, lists, rotates and revokes the secrets that sign callbacks."""


@secrets.command()
@click.argument("url", required=False, type=TARGET_URL)
@_namespace_option
@click.option("--deployment", is_flag=True, help="Sign for every namespace without a secret of its own.")
@click.option(
    "--scheme",
    type=click.Choice(["v1", "v1a"]),
    default="v1",
    show_default=True,
    help="v1 is HMAC-SHA256 with a shared secret, v1a is ed25519 with a key pair.",
)
@_secret_options
@click.option(
    "--overlap",
    type=Duration(),
    metavar="TIME",
    help="The time for which the secrets that signed before sign too, such as 1d. Default: none.",
)
@gateway_option
@json_option
def create(
    url: str | None,
    namespace: str | None,
    deployment: bool,
    overlap: timedelta | None,
    gateway: str | None,
    json_: bool,
    **options: Any,
) -> None:
    """Creates a secret for the target URL, or without URL for a namespace; shows it only once."""
    if deployment and (url is not None or namespace is not None):
        raise click.UsageError("--deployment has neither URL nor --namespace: it is for all of them")
    with open_client(gateway) as client:
        answer = client.create_callback_secret(
            url=url,
            namespace=EVERY_NAMESPACE if deployment else namespace,
            overlap_s=None if overlap is None else overlap.total_seconds(),
            **without_empty(**options),
        )
    _print_created(answer, json_=json_)


@secrets.command("list")
@_namespace_option
@click.option("--url", metavar="URL", type=TARGET_URL, help="List only secrets of the target with this URL.")
@limit_option("secrets")
@client_options
def list_(namespace: str | None, url: str | None, limit: int, client: SyncClient, json_: bool) -> None:
    """Lists secrets with their scope, scheme and state, but never the secrets themselves."""
    print_list(
        list(client.callback_secrets(namespace=namespace, url=url, limit=limit)),
        ("id", "for", "scheme", "state", "until", "stored", "public key"),
        lambda secret: (
            secret["id"],
            _scope_text(secret),
            secret["scheme"],
            secret["state"],
            moment(secret["expires_at"]),
            secret["reference"] or f"encrypted by {secret['encryption_key']}",
            secret["public_key"] or "",
        ),
        "no secrets: PENSTOCK_CALLBACK_SECRETS of the callbacks service signs",
        json_=json_,
    )


@secrets.command()
@click.argument("id_", metavar="ID")
@click.option(
    "--overlap",
    type=Duration(),
    default="1d",
    show_default=True,
    metavar="TIME",
    help="The time for which the old secret signs too.",
)
@_secret_options
@client_options
def rotate(id_: str, overlap: timedelta, client: SyncClient, json_: bool, **options: Any) -> None:
    """Creates a secret that replaces another; both sign until the overlap ends."""
    answer = client.rotate_callback_secret(id_, overlap_s=overlap.total_seconds(), **without_empty(**options))
    _print_created(answer, json_=json_)
    if not json_:
        click.echo(f"{id_} signs too until {moment(answer['replaces']['expires_at'])}", err=True)


@secrets.command()
@click.argument("id_", metavar="ID")
@client_options
def revoke(id_: str, client: SyncClient, json_: bool) -> None:
    """Revokes a secret; it signs nothing any more, and without another one the wider ones sign."""
    answer = client.revoke_callback_secret(id_)
    print_answer(answer, f"{id_} is revoked; it signed for {_scope_text(answer)}", json_=json_)


@secrets.command()
@client_options
def reencrypt(client: SyncClient, json_: bool) -> None:
    """Encrypts all stored secrets with the first key of PENSTOCK_ENCRYPTION_KEYS."""
    answer = client.reencrypt_callback_secrets()
    print_answer(
        answer,
        f"{answer['reencrypted']:,} secrets were encrypted again; key {answer['encryption_key']} encrypts all",
        json_=json_,
    )


@secrets.command("public-keys")
@click.argument("url", required=False, type=TARGET_URL)
@_namespace_option
@client_options
def public_keys(url: str | None, namespace: str | None, client: SyncClient, json_: bool) -> None:
    """Shows the ed25519 keys that verify callbacks to the target URL; receivers need no API key."""
    found = client.public_keys(url, namespace)
    for key in found:
        print_document(key) if json_ else click.echo(key["public_key"])
    if not found and not json_:
        console().print("no public keys: symmetric secrets sign")


def _scope_text(secret: Mapping[str, Any]) -> str:
    if secret["url"]:
        return f"{secret['url']} ({secret['namespace']})"
    return "the deployment" if secret["namespace"] == EVERY_NAMESPACE else f"namespace {secret['namespace']}"


def _print_created(answer: Mapping[str, Any], *, json_: bool) -> None:
    """Prints the secret or the public key alone on standard output, for scripts."""
    if json_:
        click.echo(json.dumps(answer))
        return
    click.echo(f"secret {answer['id']} signs for {_scope_text(answer)}", err=True)
    if answer["secret"]:
        click.echo("this is shown only once:", err=True)
        click.echo(answer["secret"])
    elif answer["public_key"]:
        click.echo(answer["public_key"])
