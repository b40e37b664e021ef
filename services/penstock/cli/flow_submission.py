"""The verbs that upload flow definitions, start flows and send events to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from penstock.cli.flow_files import FILE, REFUSED, children_first, print_faults, validated
from penstock.cli.flow_group import flows
from penstock.cli.flow_views import watch_flow
from penstock.cli.gateway import client_options, gateway_option, open_client, without_empty
from penstock.cli.inputs import json_of, naming_options
from penstock.cli.names import FLOW_NAME
from penstock.cli.options import (
    PRIORITY,
    callback_option,
    events_option,
    json_option,
    label_option,
    list_options,
)
from penstock.cli.output import moment, print_answer, print_document, print_list
from penstock.cli.param_types import Whole
from penstock.client import SyncClient
from penstock.core.flow.outline import references
from penstock.errors import Conflict, Invalid, InvalidRecord, PenstockError
from penstock.http.problems import relocated


@flows.command()
@click.argument("flow", metavar="NAME", type=FLOW_NAME)
@click.option(
    "--input",
    "pairs",
    multiple=True,
    metavar="NAME=TEXT|NAME:=JSON",
    help="An input: a text behind =, or another JSON value behind :=. The option is repeatable.",
)
@click.option(
    "--inputs",
    metavar="VALUE",
    help="A JSON object with inputs. @FILE reads it from a file, and - from standard input.",
)
@click.option("--version", type=Whole(1), help="The version of the definition. Default: the newest one.")
@click.option("--priority", type=PRIORITY, help="The order of release of the flow's tasks. Default: MEDIUM.")
@click.option(
    "--idempotency-key",
    help="A text that identifies the submission: submitting it again returns the first flow.",
)
@callback_option("A target that is called when the flow ends.")
@events_option("The transitions that are published. Default: final.")
@label_option("A label of the flow. The option is repeatable.")
@click.option("--watch", "watch_", is_flag=True, help="Wait until the flow has ended, as `watch` does.")
@gateway_option
@json_option
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    flow: str,
    pairs: tuple[str, ...],
    inputs: str | None,
    watch_: bool,
    gateway: str | None,
    json_: bool,
    **options: Any,
) -> None:
    """Starts a flow; its definition must be uploaded.

    `--input day=2026-11-23 --input size:=5` gives a text and a number.
    """
    wire = without_empty(flow=flow, inputs=_inputs_of(pairs, inputs), **options)
    with open_client(gateway) as client:
        with naming_options(below="/0"):
            [submitted] = client.submit_flows([wire])
        existed = "existed already, with the same idempotency key; its first inputs stay"
        text = f"flow {submitted.id} {'submitted' if submitted.created else existed}"
        print_answer({"id": submitted.id, "created": submitted.created}, text, json_=json_)
        if watch_:
            ctx.exit(watch_flow(client, submitted.id, json_=json_))


def _inputs_of(pairs: tuple[str, ...], whole: str | None) -> dict[str, Any]:
    inputs = {} if whole is None else json_of(whole, "/inputs")
    if not isinstance(inputs, dict):
        raise InvalidRecord('--inputs is no JSON object: write {"NAME": VALUE}')
    for pair in pairs:
        name, equals, value = pair.partition("=")
        is_json = name.endswith(":")
        name = name.removesuffix(":")
        if not equals or not name:
            raise InvalidRecord(
                f"--input {pair!r} has no name and value: write --input NAME=TEXT or --input NAME:=JSON"
            )
        if name in inputs:
            raise InvalidRecord(f"the input {name!r} is given twice: remove one")
        inputs[name] = json_of(value, f"/inputs/{name}") if is_json else value
    return inputs


@flows.command()
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@gateway_option
@json_option
def upload(files: tuple[Path, ...], gateway: str | None, json_: bool) -> None:
    """Uploads flow definitions in YAML or JSON; child flows among the files go first.

    A version never changes: uploading the same content again does nothing, and another content
    needs another version. If a file has a fault of its own, no file is uploaded. The gateway may
    refuse others, for example because of a task type that it does not know. Then all files are
    uploaded that do not depend on a refused one. In both cases the status is 3.
    """
    found = validated(files, None)
    invalid = False
    for file, (_, faults) in found.items():
        # The gateway may have child flows that are not among the files.
        if own := [fault for fault in faults if fault.code != "unknown_flow"]:
            print_faults(file, own, json_=json_)
            invalid = True
    if invalid:
        click.get_current_context().exit(REFUSED)
    refused: dict[str, Path] = {}
    with open_client(gateway) as client:
        for file, definition in children_first({file: document for file, (document, _) in found.items()}):
            try:
                _require_children(definition, refused)
                stored = client.put_flow_definition(definition)
            except (Invalid, Conflict) as error:
                # The gateway knows the task types and the child flows, but not the file.
                located = _located(error, file) if isinstance(error, Invalid) else error
                if len(files) == 1:
                    raise located from None
                _print_refusal(file, located, json_=json_)
                refused[definition["flow"]] = file
            else:
                print_answer(
                    {name: stored[name] for name in ("name", "version", "created_at")},
                    f"{file}: flow {stored['name']}, version {stored['version']} is stored",
                    json_=json_,
                )
    if refused:
        click.get_current_context().exit(REFUSED)


def _require_children(definition: Mapping[str, Any], refused: Mapping[str, Path]) -> None:
    for name, _ in references(definition):
        if name in refused:
            raise InvalidRecord(f"not uploaded, because its child flow {name!r} in {refused[name]} is not")


def _print_refusal(file: Path, error: PenstockError, *, json_: bool) -> None:
    faults = error.faults if isinstance(error, Invalid) else [error]
    texts = [str(fault) for fault in faults]
    if json_:
        print_document({"file": str(file), "valid": False, "errors": [{"detail": text} for text in texts]})
        return
    for text in texts:
        click.echo(text if text.startswith(f"{file}:") else f"{file}: {text}")


def _located(error: Invalid, file: Path) -> Invalid:
    # Imported here, since it needs the packages of the group `flows`.
    from penstock.flows.faults import Fault  # noqa: PLC0415
    from penstock.flows.loading import load  # noqa: PLC0415

    loaded = load(file.read_bytes())

    def move(pointer: str) -> str:
        placed = loaded.place(Fault("schema", pointer, ""))
        return f"{file}:{placed.line}:{placed.column}" + (f" ({pointer})" if pointer else "")

    return relocated(error, move)


@flows.command()
@client_options
def definitions(client: SyncClient, json_: bool) -> None:
    """Lists the flow definitions with their newest versions."""
    print_list(
        list(client.flow_definitions()),
        ("flow", "newest version", "versions", "uploaded"),
        lambda each: (
            each["name"],
            str(each["version"]),
            f"{each['versions']:,}",
            moment(each["created_at"]),
        ),
        "no flow definitions; upload one with `penstock flows upload FILE`",
        json_=json_,
    )


@flows.command()
@click.argument("name", type=FLOW_NAME)
@list_options("versions")
@client_options
def versions(name: str, limit: int | None, client: SyncClient, json_: bool) -> None:
    """Lists the versions of a flow definition, newest first."""
    print_list(
        list(client.flow_versions(name, limit=limit)),
        ("version", "uploaded", "by", "description"),
        lambda each: (
            str(each["version"]),
            moment(each["created_at"]),
            each["created_by"] or "",
            (each["description"] or "").partition("\n")[0],
        ),
        f"flow {name} has no versions",
        json_=json_,
    )


@flows.command("send-event")
@click.argument("name")
@click.option(
    "--key", default="", help="The key of the waits. Default: the empty key, as of waits without one."
)
@click.option(
    "--data",
    metavar="VALUE",
    help="A JSON value for the nodes that wait. @FILE reads it from a file, and - from standard input.",
)
@click.option(
    "--id", "id_", help="The id of the event: sending it again has no effect. Default: a random one."
)
@gateway_option
@json_option
def send_event(
    name: str, key: str, data: str | None, id_: str | None, gateway: str | None, json_: bool
) -> None:
    """Sends an event to the flows that wait for it, now or within 24 hours."""
    value = None if data is None else json_of(data, "/data")
    with open_client(gateway) as client, naming_options():
        created = client.send_event(name, value, key=key, id=id_)
    print_answer(
        {"created": created},
        f"event {name} {'sent' if created else 'was there already, with the same id'}",
        json_=json_,
    )
