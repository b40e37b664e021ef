"""The verbs about targets of callbacks: list, disable, enable, limit; secrets have a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from penstock.cli.callback_secrets import secrets
from penstock.cli.gateway import client_options, gateway_option, open_client
from penstock.cli.groups import Group
from penstock.cli.names import TARGET_URL
from penstock.cli.options import json_option, list_options
from penstock.cli.output import fields, moment, print_answer, print_document, print_list, state_text, table
from penstock.cli.param_types import Rate
from penstock.client import SyncClient
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.errors import NotFound

namespace_option = click.option(
    "--namespace",
    metavar="NAME",
    help="The namespace of the target. Default: the only namespace of the API key, or else `default`.",
)


class _RateOrNone(Rate):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return None if value in (None, "none") else super().convert(value, param, ctx)
        except click.BadParameter as error:
            error.message += (
                " Give calls a second, such as 10 or 0.5, or `none` for the setting of the service."
            )
            raise


@click.group(cls=Group, invoke_without_command=True)
@click.option(
    "--state", type=click.Choice(["normal", "abnormal", "disabled"]), help="List only targets in this state."
)
@click.option("--prefix", metavar="URL", help="List only targets whose URL begins with this text.")
@click.option(
    "--url",
    metavar="URL",
    type=TARGET_URL,
    help="Show everything about the target with this URL, in every namespace.",
)
@click.option("--namespace", metavar="NAME", help="List only targets of this namespace.")
@list_options("targets")
@gateway_option
@json_option
@click.pass_context
def targets(
    ctx: click.Context,
    /,
    gateway: str | None,
    json_: bool,
    url: str | None,
    limit: int | None,
    **filters: Any,
) -> None:
    """Lists targets of callbacks with health and backlog; disables, enables and limits them."""
    if ctx.invoked_subcommand is not None:
        return
    with open_client(gateway) as client:
        found = client.targets(**filters, url=url, limit=None if url is not None else limit)
        if url is not None:
            _print_details(url, list(found), filters["namespace"], json_=json_)
        else:
            _print_list(found, narrowed=any(filters.values()), json_=json_)


def _print_list(targets: Iterable[Mapping[str, Any]], *, narrowed: bool, json_: bool) -> None:
    # JSON is printed as it comes.
    shown = targets if json_ else list(targets)
    # Most deployments have one namespace only, and need no column for it.
    several = not json_ and any(target["namespace"] != DEFAULT_NAMESPACE for target in shown)
    print_list(
        shown,
        (
            "target",
            *(["namespace"] if several else []),
            *("state", "slow", "normal+diverted+held", "rate", "called", "reason or last error"),
        ),
        lambda target: (
            target["url"],
            *([target["namespace"]] if several else []),
            state_text(target["state"]),
            str(target["count"]),
            _backlog_text(target),
            "" if target["rate"] is None else f"{target['rate']:g}/s",
            moment(target["called_at"]),
            target["why"] or (target["attempts"][-1]["message"] if target["attempts"] else ""),
        ),
        "no such targets; `penstock targets` lists all targets"
        if narrowed
        else "no targets: no task had a callback yet; `penstock submit TYPE --callback URL` submits a task with one",
        json_=json_,
    )


def _print_details(
    url: str, targets: Sequence[Mapping[str, Any]], namespace: str | None, *, json_: bool
) -> None:
    """Prints the targets with one URL, one for each namespace.

    Raises:
        NotFound: there is no target.
    """
    if not targets:
        where = f" in the namespace {namespace}" if namespace else ""
        raise NotFound(f"there is no target {url}{where}: it has never had a callback")
    for number, target in enumerate(targets):
        if number and not json_:
            click.echo()
        _print_target(target, json_=json_)


def _never_called_warning(answer: Mapping[str, Any]) -> str:
    """A warning that the URL may be misspelt; empty when the target was called or has callbacks."""
    target = answer["target"]
    has_backlog = any(target["backlog"][name] for name in ("normal", "diverted", "held"))
    if has_backlog or target["called_at"] or target["attempts"]:
        return ""
    return "; it was never called: check that the URL is the one that was submitted"


def _backlog_text(target: Mapping[str, Any]) -> str:
    backlog = target["backlog"]
    counts = "+".join(f"{backlog[name]:,}" for name in ("normal", "diverted", "held"))
    return counts if backlog["complete"] else f"{counts} or more"


def _print_target(target: Mapping[str, Any], *, json_: bool) -> None:
    if json_:
        print_document(target)
        return
    pairs: list[tuple[str, Any]] = [
        ("target", target["url"]),
        *([("namespace", target["namespace"])] if target["namespace"] != DEFAULT_NAMESPACE else []),
        ("state", state_text(target["state"])),
        *([("why", target["why"])] if target["why"] else []),
        ("slow calls", f"{target['count']}, the last {moment(target['slow_at']) or 'never'}"),
        ("failures in a row", str(target["failures"])),
        ("rate", "the setting of the service" if target["rate"] is None else f"{target['rate']:g}/s"),
        ("normal+diverted+held", _backlog_text(target)),
        ("owner", target["owner"] or "none yet"),
        ("since", moment(target["changed_at"])),
    ]
    fields(pairs)
    if target["attempts"]:
        click.echo()
        table(
            ("at", "callback", "attempt", "took", "status", "error"),
            (
                (
                    moment(attempt["at"]),
                    attempt["callback"],
                    str(attempt["attempt"]),
                    f"{attempt['took_ms']:,} ms",
                    str(attempt["status"] or ""),
                    attempt["message"],
                )
                for attempt in target["attempts"]
            ),
        )


targets.add_command(secrets)
targets.add_list("Lists targets of callbacks, as `penstock targets` does.")


@targets.command()
@click.argument("url", type=TARGET_URL)
@click.option("--why", required=True, help="The reason, which lists of targets show.")
@namespace_option
@client_options
def disable(url: str, why: str, namespace: str | None, client: SyncClient, json_: bool) -> None:
    """Stops calls to a target; its callbacks are held until it is enabled."""
    answer = client.disable_target(url, why, namespace)
    text = f"{url} is disabled" if answer["changed"] else f"{url} was disabled already"
    print_answer(answer, text + _never_called_warning(answer), json_=json_)


@targets.command()
@click.argument("url", type=TARGET_URL)
@namespace_option
@client_options
def enable(url: str, namespace: str | None, client: SyncClient, json_: bool) -> None:
    """Resumes calls to a target: its health is reset, and its held callbacks are sent."""
    answer = client.enable_target(url, namespace)
    held = answer["target"]["backlog"]["held"]
    print_answer(
        answer,
        f"{url} is enabled; {held:,} held callbacks will be sent"
        if answer["changed"]
        else f"{url} was normal already",
        json_=json_,
    )


# With `ignore_unknown_options` click reports a negative rate as a wrong rate, instead of as an
# unknown option.
@targets.command(context_settings={"ignore_unknown_options": True})
@click.argument("url", type=TARGET_URL)
@click.argument("rate", type=_RateOrNone())
@namespace_option
@client_options
def limit(url: str, rate: float | None, namespace: str | None, client: SyncClient, json_: bool) -> None:
    """Limits the calls to a target to RATE a second; `none` is the setting of the service."""
    answer = client.limit_target(url, rate, namespace)
    limit_text = "the rate of the service" if rate is None else f"{rate:g} calls a second at most"
    print_answer(answer, f"{url} gets {limit_text}{_never_called_warning(answer)}", json_=json_)
