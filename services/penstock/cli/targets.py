"""The verbs about targets of callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from penstock.cli.gateway import client, gateway_option
from penstock.cli.numbers import Pace, Whole
from penstock.cli.output import as_json, console, fields, moment, print_json, state_text, table
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.errors import NotFound

_LATEST = 20

namespace_option = click.option(
    "--namespace",
    metavar="NAME",
    help="In which it is called. Default: the only one that your key is confined to, else `default`.",
)


class _Rate(Pace):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return None if value in (None, "none") else super().convert(value, param, ctx)
        except click.BadParameter as error:
            error.message += (
                " Give calls a second, such as 10 or 0.5, or `none` for the setting of the service."
            )
            raise


@click.group(invoke_without_command=True)
@click.option("--state", type=click.Choice(["normal", "abnormal", "disabled"]), help="Only those.")
@click.option("--prefix", metavar="URL", help="Only URLs that begin with this.")
@click.option("--url", metavar="URL", help="Everything about this one, in each namespace that calls it.")
@click.option("--namespace", metavar="NAME", help="Only of this namespace.")
@click.option("--limit", type=Whole(1), default=_LATEST, show_default=True, help="Most targets.")
@click.option("--all", "all_", is_flag=True, help="No limit.")
@gateway_option
@as_json
@click.pass_context
def targets(
    ctx: click.Context,
    /,
    gateway: str | None,
    json_: bool,
    url: str | None,
    limit: int,
    all_: bool,
    **filters: Any,
) -> None:
    """Lists targets of callbacks with their health and what they are owed; disables, enables and limits them."""
    if ctx.invoked_subcommand is not None:
        return
    with client(gateway) as found:
        known = found.targets(**filters, url=url, limit=None if all_ or url is not None else limit)
        if json_ and url is None:
            for target in known:
                print_json(target)
            return
        shown = list(known)
    if url is not None:
        _show_all(url, shown, filters["namespace"], json_=json_)
    elif shown:
        _list(shown)
    elif any(filters.values()):
        console().print("no such targets; `penstock targets` lists all there are")
    else:
        console().print(
            "no targets: no callback was owed yet; `penstock submit TYPE --callback URL` asks for one"
        )


def _list(shown: Sequence[Mapping[str, Any]]) -> None:
    # Most deployments have no namespaces.
    named = any(target["namespace"] != DEFAULT_NAMESPACE for target in shown)
    table(
        (
            "target",
            *(["namespace"] if named else []),
            *("state", "slow", "normal+diverted+held", "rate", "called", "why, or last met"),
        ),
        [
            (
                target["url"],
                *([target["namespace"]] if named else []),
                state_text(target["state"]),
                str(target["count"]),
                _backlog(target),
                "" if target["rate"] is None else f"{target['rate']:g}/s",
                moment(target["called_at"]),
                target["why"] or (target["attempts"][-1]["message"] if target["attempts"] else ""),
            )
            for target in shown
        ],
    )


def _show_all(url: str, shown: Sequence[Mapping[str, Any]], namespace: str | None, *, json_: bool) -> None:
    """The targets at one address, one of each namespace.

    Raises:
        NotFound: there is none.
    """
    if not shown:
        where = f" in the namespace {namespace}" if namespace else ""
        raise _advised(NotFound(f"there is no target {url}{where}: nothing was ever sent to it"))
    for number, target in enumerate(shown):
        if number and not json_:
            click.echo()
        _show(target, json_=json_)


def _advised(error: NotFound) -> NotFound:
    error.add_note("`penstock targets` lists those there are; a target is the whole URL, as it was submitted")
    return error


def _unheard_of(told: Mapping[str, Any]) -> str:
    """A misspelt URL is as good as any other, but was never called."""
    target = told["target"]
    waits = any(target["backlog"][name] for name in ("normal", "diverted", "held"))
    if waits or target["called_at"] or target["attempts"]:
        return ""
    return "; no call to it is on record yet: is that the URL as it was submitted?"


def _backlog(target: Mapping[str, Any]) -> str:
    backlog = target["backlog"]
    counts = "+".join(f"{backlog[name]:,}" for name in ("normal", "diverted", "held"))
    return counts if backlog["complete"] else f"{counts} or more"


def _show(target: Mapping[str, Any], *, json_: bool) -> None:
    if json_:
        print_json(target)
        return
    pairs: list[tuple[str, Any]] = [
        ("target", target["url"]),
        *([("namespace", target["namespace"])] if target["namespace"] != DEFAULT_NAMESPACE else []),
        ("state", state_text(target["state"])),
        *([("why", target["why"])] if target["why"] else []),
        ("slow calls", f"{target['count']}, the last {moment(target['slow_at']) or 'never'}"),
        ("quick failures on end", str(target["failures"])),
        ("rate", "as the service is set" if target["rate"] is None else f"{target['rate']:g}/s"),
        ("normal+diverted+held", _backlog(target)),
        ("judged by", target["owner"] or "nobody yet"),
        ("since", moment(target["changed_at"])),
    ]
    fields(pairs)
    if target["attempts"]:
        click.echo()
        table(
            ("at", "callback", "attempt", "took", "status", "met"),
            (
                (
                    moment(one["at"]),
                    one["callback"],
                    str(one["attempt"]),
                    f"{one['took_ms']:,} ms",
                    str(one["status"] or ""),
                    one["message"],
                )
                for one in target["attempts"]
            ),
        )


@targets.command()
@click.argument("url")
@click.option("--why", required=True, help="Shown with the target.")
@namespace_option
@gateway_option
@as_json
def disable(url: str, why: str, namespace: str | None, gateway: str | None, json_: bool) -> None:
    """Sends nothing more to a target: what it is owed is held."""
    with client(gateway) as found:
        told = found.disable_target(url, why, namespace)
    text = f"{url} is disabled" if told["changed"] else f"{url} was disabled already"
    _tell(told, text + _unheard_of(told), json_=json_)


@targets.command()
@click.argument("url")
@namespace_option
@gateway_option
@as_json
def enable(url: str, namespace: str | None, gateway: str | None, json_: bool) -> None:
    """Sends to a target again: its health begins anew, and what was held is let go."""
    with client(gateway) as found:
        try:
            told = found.enable_target(url, namespace)
        except NotFound as error:
            raise _advised(error) from None
    held = told["target"]["backlog"]["held"]
    _tell(
        told,
        f"{url} is enabled; {held:,} held callbacks are let go"
        if told["changed"]
        else f"{url} was normal already",
        json_=json_,
    )


# A negative rate is a wrong rate, and not an option that does not exist.
@targets.command(context_settings={"ignore_unknown_options": True})
@click.argument("url")
@click.argument("rate", type=_Rate())
@namespace_option
@gateway_option
@as_json
def limit(url: str, rate: float | None, namespace: str | None, gateway: str | None, json_: bool) -> None:
    """Sets the most calls a second that a target gets; `none` is the setting of the service."""
    with client(gateway) as found:
        told = found.limit_target(url, rate, namespace)
    pace = "what the service is set to" if rate is None else f"{rate:g} calls a second at most"
    _tell(told, f"{url} gets {pace}{_unheard_of(told)}", json_=json_)


def _tell(told: Mapping[str, Any], text: str, *, json_: bool) -> None:
    if json_:
        print_json(told)
    else:
        click.echo(text)
