"""The command line against a real gateway, in this process and as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from tests.support.gateways import running_gateway
from tests.support.invoking import Invoke, documents, invoker
from tests.support.waiting import wait_until

from penstock.cli import confirmation
from penstock.client import Client, TaskFilter
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import CALLBACKS, EVENTS, PLATFORM, REVOKED, TASK_LOGS
from penstock.settings import Kafka


@pytest.fixture
async def penstock(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Invoke]:
    """Runs the command line beside a gateway, with the type `media`."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("PENSTOCK_") and not name.startswith("PENSTOCK_TEST_"):
            monkeypatch.delenv(name)
    # The gateway publishes to these topics; a missing topic delays its stop.
    await create_topics(Kafka(kafka=kafka_servers, prefix=prefix), [CALLBACKS, EVENTS, REVOKED, TASK_LOGS])
    async with running_gateway(
        kafka=kafka_servers, prefix=prefix, postgres=database, objects=f"file://{tmp_path / 'objects'}"
    ) as gateway:
        monkeypatch.setenv("PENSTOCK_GATEWAY", gateway.url)
        monkeypatch.setenv("PENSTOCK_KAFKA", kafka_servers)
        monkeypatch.setenv("PENSTOCK_POSTGRES", database)
        monkeypatch.setenv("PENSTOCK_PREFIX", prefix)

        invoke = invoker()
        assert (await invoke("types", "add", "media", "--first-stage", "probe")).exit_code == 0
        yield invoke


async def set_state(database: str, state: str, *ids: int) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute("UPDATE penstock.task SET state = $1 WHERE id = ANY($2)", state, list(ids))
    await connection.close()


async def test_a_task_is_rerun(penstock: Invoke) -> None:
    """F3, O8: an ended task is run again from a stage; a refusal says why."""
    [first] = documents(await penstock("submit", "media", "--context", '{"n": 1}', "--json"))
    task = str(first["id"])
    refused = await penstock("tasks", "rerun", task)
    assert refused.exit_code == 3
    assert f"task {task} is ready: wait for its end, or cancel it first" in refused.stderr
    await penstock("cancel", task)
    assert (
        "has not entered stage 'cut', but probe"
        in (await penstock("tasks", "rerun", task, "--from", "cut")).stderr
    )
    options = ("--from", "probe", "--idempotency-key", "again")
    [again] = documents(await penstock("tasks", "rerun", task, *options, "--json"))
    [shown] = documents(await penstock("get", str(again["id"]), "--json"))
    assert (shown["context"], shown["rerun_of"], shown["stage"]) == ({"n": 1}, first["id"], "probe")
    existed = (await penstock("tasks", "rerun", task, *options)).stdout
    assert existed == f"task {again['id']} existed already, with the same idempotency key\n"
    text = (await penstock("tasks", "rerun", task)).stdout
    assert text.endswith(f"submitted: it runs task {task} again\n")


async def test_types_are_registered_and_listed(penstock: Invoke) -> None:
    """T2, O8: types are registered, shown and listed, as text and as JSON."""
    assert (await penstock("types")).stdout.splitlines()[1].split()[:2] == ["media", "probe"]
    [added] = documents(await penstock("types", "add", "report", "--max-attempts", "9", "--json"))
    assert added["max_attempts"] == 9
    assert [one["name"] for one in documents(await penstock("types", "--json"))] == ["media", "report"]
    [shown] = documents(await penstock("types", "show", "report", "--json"))
    assert (shown["max_attempts"], shown["lease_ms"], shown["max_losses"]) == (9, 300_000, 3)
    assert "300000" in (await penstock("types", "show", "report")).stdout
    again = await penstock("types", "add", "report", "--max-losses", "4", "--partitions", "8")
    assert "type report existed already, changed: max_losses" in again.stdout
    [kept] = documents(await penstock("types", "add", "report", "--json"))
    assert (kept["max_attempts"], kept["max_losses"]) == (9, 4)
    missing = await penstock("types", "show", "repotr")
    assert (missing.exit_code, "no task type 'repotr'" in missing.stderr) == (4, True)
    refused = await penstock("types", "add", "report", "--partitions", "3")
    assert refused.exit_code == 3
    assert "cannot be changed" in refused.stderr


async def test_a_task_is_submitted_shown_listed_and_cancelled(penstock: Invoke, tmp_path: Path) -> None:
    """T5, O8: a task is submitted with every option, read back, listed and cancelled."""
    (tmp_path / "context.json").write_text('{"file": "a.mp4"}')
    arguments = (
        "submit",
        "media",
        "--context",
        "@context.json",
        "--idempotency-key",
        "k",
        "--priority",
        "high",
        "--label",
        "customer=acme",
        "--callback",
        "https://shop.example/hook",
        "--run-at",
        "2090-01-01T00:00:00Z",
    )
    [first] = documents(await penstock(*arguments, "--json"))
    assert first["created"] is True
    again = await penstock(*arguments)
    assert "existed already, with the same idempotency key; its first context stays" in again.stdout
    [task] = documents(await penstock("get", str(first["id"]), "--json"))
    assert (task["context"], task["priority"], task["state"]) == ({"file": "a.mp4"}, "HIGH", "scheduled")
    shown = (await penstock("get", str(first["id"]))).stdout
    assert "customer=acme" in shown
    assert '{"file": "a.mp4"}' in shown
    [listed] = documents(await penstock("list", "--label", "customer=acme", "--json"))
    assert listed["id"] == first["id"]
    assert "scheduled" in (await penstock("list")).stdout
    assert (await penstock("list", "--state", "failed")).stdout == "no tasks\n"
    assert documents(await penstock("cancel", str(first["id"]), "--json")) == [
        {"cancelled": [first["id"]], "unchanged": [], "unknown": []}
    ]


async def test_callbacks_come_from_options_files_or_the_type(penstock: Invoke, tmp_path: Path) -> None:
    """C1, O8: callbacks are given as URLs, objects or files, are taken from the type, or are turned
    off. The values of headers are never printed."""
    (tmp_path / "hook.json").write_text('{"url": "https://b.example/", "headers": {"X-Token": "s3cr3t"}}\n')
    usual = {"url": "https://usual.example/", "events": "all"}
    [added] = documents(
        await penstock(
            "types", "add", "media", "--callback", json.dumps(usual), "--callback", "@hook.json", "--json"
        )
    )
    hidden = {"url": "https://b.example/", "headers": {"X-Token": "***"}}
    assert added["callbacks"] == [usual, hidden]
    for arguments, callbacks in (
        ((), [usual, hidden]),
        (("--no-callbacks",), []),
        (("--callback", "https://a.example/", "--callback", "@hook.json"), ["https://a.example/", hidden]),
    ):
        [task] = documents(await penstock("submit", "media", *arguments, "--json"))
        [shown] = documents(await penstock("get", str(task["id"]), "--json"))
        assert shown["callbacks"] == callbacks
        assert "s3cr3t" not in (await penstock("get", str(task["id"]))).stdout
    (tmp_path / "hook.json").write_text('{"url": "https://b.example/", "headers": {"Host": "s3cr3t"}}')
    refused = await penstock("submit", "media", "--callback", "@hook.json")
    assert refused.exit_code == 3
    assert "--callback (/0/headers/Host)" in refused.stderr
    assert "s3cr3t" not in refused.output
    both = await penstock("submit", "media", "--callback", "https://a.example/", "--no-callbacks")
    assert both.exit_code == 2


async def test_cancelling_unknown_tasks_gives_status_4(penstock: Invoke) -> None:
    """O8: the known tasks are cancelled nevertheless, and the error names the unknown ids."""
    ids = [str(one["id"]) for _ in range(2) for one in documents(await penstock("submit", "media", "--json"))]
    assert (await penstock("cancel", ids[0])).exit_code == 0
    outcome = await penstock("cancel", *ids, "4711", "4712")
    assert (outcome.exit_code, outcome.stdout) == (4, "1 cancelled, 1 had ended\n")
    assert "there is no task 4711, 4712" in outcome.stderr


async def test_a_file_or_standard_input_submits_many_tasks(penstock: Invoke, tmp_path: Path) -> None:
    """T5, O8: each line has one object. An error names its line and gives status 3."""
    lines = [json.dumps({"context": n}) for n in range(600)]
    (tmp_path / "tasks.ndjson").write_text("\n".join(lines))
    outcome = await penstock("submit", "media", "--file", "tasks.ndjson", "--label", "b=1")
    assert outcome.stdout.startswith("600 tasks submitted, 0 existed already")
    assert len(documents(await penstock("list", "--label", "b=1", "--all", "--json"))) == 600
    assert len(documents(await penstock("submit", "--file", "-", "--json", input='{"type": "media"}\n'))) == 1
    lines[560] = '{"priority": "URGENT"}'
    (tmp_path / "tasks.ndjson").write_text("\n".join(lines))
    refused = await penstock("submit", "media", "--file", "tasks.ndjson")
    assert refused.exit_code == 3
    assert "tasks.ndjson, line 561: /priority: " in refused.stderr


async def test_watch_gives_status_1_unless_all_tasks_succeed(penstock: Invoke, database: str) -> None:
    """O8: `watch` takes ids or a filter, and prints the last counts."""
    ids = [one["id"] for _ in range(3) for one in documents(await penstock("submit", "media", "--json"))]
    await set_state(database, "succeeded", *ids)
    watched = await penstock("watch", *map(str, ids))
    assert (watched.exit_code, watched.stdout) == (0, "3 succeeded\n")
    await set_state(database, "failed", ids[0])
    watched = await penstock("watch", "--type", "media", "--json")
    assert watched.exit_code == 1
    assert documents(watched) == [{"states": {"succeeded": 2, "failed": 1}}]
    unknown = await penstock("watch", str(ids[1]), "4711", "4712")
    assert (unknown.exit_code, "there is no task 4711, 4712" in unknown.stderr) == (4, True)


async def test_submit_watches_its_task(penstock: Invoke, database: str) -> None:
    """O8: `submit --watch` follows the submitted task to its end, and shows its result."""
    outcome = asyncio.ensure_future(penstock("submit", "media", "--watch"))
    connection = await asyncpg.connect(database)

    async def end_task() -> bool:
        done = await connection.execute(
            "UPDATE penstock.task SET state = 'succeeded', result_type = 'json', result = '{\"sent\": 3}'"
            " WHERE state = 'ready'"
        )
        return done == "UPDATE 1"

    await wait_until(end_task)
    await connection.close()
    result = await outcome
    assert result.exit_code == 0
    assert result.stdout.endswith('1 succeeded\nresult: {"sent": 3}\n')


UNKNOWN_NAMES = [
    (("types", "show", "nope"), "penstock types add NAME"),
    (("types", "set", "nope", "--max-attempts", "2"), "penstock types add NAME"),
    (("types", "pause", "nope"), "penstock types add NAME"),
    (("types", "keys", "list", "nope"), "penstock types add NAME"),
    (("types", "backlog", "nope"), "penstock types add NAME"),
    (("list", "--type", "nope"), "penstock types add NAME"),
    (("get", "4711"), "penstock list"),
    (("cancel", "4711"), "penstock list"),
    (("watch", "4711"), "penstock list"),
    (("tasks", "why", "4711"), "penstock list"),
    (("tasks", "stop", "nope"), "penstock audit"),
    (("keys", "revoke", "bob"), "penstock keys list"),
    (("targets", "disable", "https://a.example", "--why", "x", "--namespace", "nope"), "penstock types"),
]


async def test_an_unknown_name_gives_status_4_and_the_command_that_lists_the_known_ones(
    penstock: Invoke,
) -> None:
    """O8: the next step stands under each error about something that does not exist."""
    for arguments, next_step in UNKNOWN_NAMES:
        refused = await penstock(*arguments)
        assert refused.exit_code == 4, (arguments, refused.output)
        assert next_step in refused.stderr.splitlines()[1], arguments


async def test_an_error_about_a_field_names_its_option(penstock: Invoke) -> None:
    """O8: the user wrote no JSON, so the error has no pointer into it. An unknown type has its next
    step as well."""
    for arguments, named in (
        (("submit", "media", "--stage", "x" * 300), "--stage: "),
        (("submit", "media", "--callback", "ftp://a.example"), "--callback (/0"),
        (("types", "add", "media", "--lease-ms", "5"), "--lease-ms: "),
        (("types", "add", "media", "--retry-jitter", "7"), "--retry-jitter: "),
        (("submit", "nope"), "TYPE: no task type 'nope'"),
    ):
        refused = await penstock(*arguments)
        assert refused.exit_code == 3, (arguments, refused.output)
        assert refused.stderr.startswith(f"penstock: {named}"), (arguments, refused.stderr)
    assert "penstock types add" in refused.stderr


async def test_conflicting_orders_of_a_type_name_the_command_that_resolves_them(penstock: Invoke) -> None:
    """S4, O8: finish_first excludes settings of concurrency keys, and each error names the way
    out. Ageing does not."""
    set_both = ("types", "set", "media", "--ageing-s", "60", "--finish-first")
    assert (await penstock(*set_both)).exit_code == 0
    refused = await penstock("types", "keys", "set", "media", "acme", "--weight", "2")
    assert refused.exit_code == 3
    assert "penstock types set media --no-finish-first" in refused.stderr
    way_out = ("types", "set", "media", "--no-finish-first")
    assert (await penstock(*way_out)).exit_code == 0
    assert (await penstock("types", "keys", "set", "media", "acme", "--weight", "2")).exit_code == 0
    refused = await penstock("types", "set", "media", "--finish-first")
    assert refused.exit_code == 3
    assert "penstock types keys reset media KEY" in refused.stderr


async def test_administration_commands_can_be_repeated(penstock: Invoke, prefix: str) -> None:
    """O2b, O6, O8: `topics`, `migrate` and `check` print text or JSON, and can be repeated
    safely."""
    missing = {
        prefix + topic.name for topic in PLATFORM if topic not in (CALLBACKS, EVENTS, REVOKED, TASK_LOGS)
    }
    assert {*(await penstock("topics")).stdout.splitlines()} == {f"created {name}" for name in missing}
    assert (await penstock("topics")).stdout == f"all {len(PLATFORM)} topics exist\n"
    [topics] = documents(await penstock("topics", "--json"))
    assert (topics["topics"], topics["created"]) == ([prefix + topic.name for topic in PLATFORM], [])
    assert documents(await penstock("migrate", "--json")) == [{"applied": []}]
    await penstock("submit", "media", "--run-at", "2090-01-01T00:00:00Z")
    checked = await penstock("check")
    assert (checked.exit_code, checked.stdout.splitlines()[0]) == (0, "tasks: 1 scheduled")
    [report] = documents(await penstock("check", "--json"))
    assert report["clean"] is True


async def test_a_running_local_deployment_is_found(penstock: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: without PENSTOCK_GATEWAY the command line uses the deployment that `penstock up`
    runs in this directory."""
    url = os.environ["PENSTOCK_GATEWAY"]
    monkeypatch.delenv("PENSTOCK_GATEWAY")
    monkeypatch.setattr("penstock.cli.deployment.local_environment", lambda **_: {"PENSTOCK_GATEWAY": url})
    assert (await penstock("types")).exit_code == 0


async def test_a_change_by_filter_is_confirmed(penstock: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: with a filter each verb says how many tasks it would change, and changes none until
    the operator agrees. Without a terminal it is refused without --yes. Ids are not asked about."""
    for _ in range(3):
        await penstock("submit", "media")
    selections = (
        ("cancel", "--type", "media"),
        ("pause", "--label", "a=b", "--type", "media"),
        ("reprioritise", "--type", "media", "--to", "high"),
    )
    refused = await penstock("tasks", *selections[0])
    assert refused.exit_code == 2
    assert "3 tasks would be cancelled (3 ready): look at them with --dry-run" in refused.stderr
    assert "--yes" in refused.stderr
    assert (await penstock("tasks", *selections[1])).exit_code == 4
    assert (await penstock("tasks", *selections[2], "--json")).exit_code == 2

    monkeypatch.setattr(confirmation, "is_interactive", lambda: True)
    declined = await penstock("tasks", *selections[0], input="n\n")
    assert declined.exit_code == 1
    assert "3 tasks would be cancelled (3 ready). Go on?" in declined.stderr
    assert (await penstock("audit")).stdout == "no operations\n"
    agreed = await penstock("tasks", *selections[0], input="y\n")
    assert "3 tasks cancelled (before: 3 ready), operation " in agreed.stdout
    [task] = documents(await penstock("submit", "media", "--json"))
    assert "1 task paused" in (await penstock("tasks", "pause", str(task["id"]))).stdout


async def test_tasks_are_changed_by_filter_and_audited(penstock: Invoke, database: str) -> None:
    """F5, O2c, O8: each verb changes tasks by filter or id, after a dry run if asked. No match
    gives status 4. The audit shows the actor, verb and count, and a running operation can be
    stopped."""
    # The width fits one operation a line.
    wide = {"COLUMNS": "250"}
    ids = [
        one["id"]
        for label in ("acme", "acme", "acme", "zeta")
        for one in documents(await penstock("submit", "media", "--label", f"tenant={label}", "--json"))
    ]
    selection = ("--type", "media", "--label", "tenant=acme")
    result = await penstock("tasks", "pause", *selection, "--dry-run")
    assert result.stdout.splitlines()[0] == "3 tasks would be paused (3 ready)"
    assert result.stdout.splitlines()[1] == f"  {ids[0]} (media, probe, ready)"
    assert (await penstock("audit")).stdout == "no operations\n"
    paused = await penstock("tasks", "pause", *selection, "--yes")
    assert "3 tasks paused (before: 3 ready), operation " in paused.stdout
    assert (await penstock("tasks", "pause", *selection)).exit_code == 4
    [document] = documents(
        await penstock("tasks", "reprioritise", str(ids[0]), "--to", "high", "--by", "ann", "--json")
    )
    assert (document["count"], document["found_in"], document["state"]) == (1, {"paused": 1}, "done")
    [shown] = documents(await penstock("get", str(ids[0]), "--json"))
    assert (shown["priority"], shown["state"]) == ("HIGH", "paused")
    assert (
        "3 tasks resumed" in (await penstock("tasks", "resume", *selection, "--rate", "1000", "--yes")).stdout
    )
    await set_state(database, "failed", *ids[:2])
    again = (
        "tasks",
        "recover",
        "--type",
        "media",
        "--stage",
        "probe",
        "--created-since",
        "2026-01-01",
        "--yes",
    )
    assert "2 tasks recovered (before: 2 failed)" in (await penstock(*again)).stdout
    assert (
        "4 tasks cancelled (before: 4 ready)"
        in (await penstock("tasks", "cancel", "--type", "media", "--yes")).stdout
    )

    for wrong in (
        ("tasks", "cancel"),
        ("tasks", "reprioritise", "1"),
        ("tasks", "pause", "1", "--rate", "0"),
    ):
        assert (await penstock(*wrong)).exit_code == 2, wrong
    assert (await penstock("tasks", "pause", "1", "--state", "succeeded")).exit_code == 3
    assert (await penstock("tasks", "stop", "none")).exit_code == 4

    entries = documents(await penstock("audit", "--json"))
    assert [(one["verb"], one["changed"]) for one in entries] == [
        ("cancel", 4),
        ("recover", 2),
        ("resume", 3),
        ("reprioritise", 1),
        ("pause", 3),
    ]
    assert entries[3]["by"] == "ann"
    assert "@" in entries[0]["by"]
    lines = (await penstock("audit", "--verb", "reprioritise", env=wide)).stdout.splitlines()
    assert "reprioritise to HIGH" in lines[1]
    assert f"ids=[{ids[0]}]" in lines[1]

    for _ in range(3):
        await penstock("submit", "media")
    async with Client(os.environ["PENSTOCK_GATEWAY"]) as client:
        await client.operate("cancel", TaskFilter(type="media"), rate=0.1, id="slow", wait=False)
    [one] = documents(await penstock("audit", "--state", "running", "--json"))
    assert one["id"] == "slow"
    result = await penstock("tasks", "stop", "slow", "--by", "ben")
    assert result.stdout == "operation slow is stopped: 1 tasks changed\n"
    [one] = documents(await penstock("audit", "--state", "stopped", "--json"))
    assert (one["id"], one["stopped_by"], one["changed"]) == ("slow", "ben", 1)


async def test_targets_are_changed_and_callbacks_replayed(penstock: Invoke, database: str) -> None:
    """C6, C8, O8: a target is disabled, shown, limited and enabled. Its dead callbacks are listed,
    counted and replayed."""
    url = "https://shop.example/hook?a=1&b=2"
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    for number in range(1, 4):
        await connection.execute(
            "INSERT INTO callback (id, target, task_id, body, state, attempt, error, due_at, finished_at) "
            "VALUES ($1, $2, $3, '{}', 'dead', 8, $4, now(), now())",
            f"msg_{number}",
            url,
            number,
            '{"kind": "status", "message": "status 503; attempt 8 was the last"}',
        )
    assert (await penstock("targets")).stdout.startswith("no targets: no task had a callback yet")
    assert (await penstock("targets", "--state", "disabled")).stdout.startswith(
        "no such targets; `penstock targets`"
    )
    for unknown in (("--url", url), ("enable", url)):
        answer = await penstock("targets", *unknown)
        assert answer.exit_code == 4
        assert f"there is no target {url}: it has never had a callback" in answer.stderr
        assert "`penstock targets` lists the targets" in answer.stderr
    assert (await penstock("targets", "disable", "shop.example", "--why", "x")).exit_code == 3
    assert "is disabled" in (await penstock("targets", "disable", url, "--why", "until noon")).stdout
    [answer] = documents(await penstock("targets", "disable", url, "--why", "until noon", "--json"))
    assert answer["changed"] is False
    limited = (await penstock("targets", "limit", url, "12.5")).stdout
    assert (
        limited
        == f"{url} gets 12.5 calls a second at most; it was never called: check that the URL is the one that was submitted\n"
    )
    assert (await penstock("targets", "limit", url, "fast")).exit_code == 2
    [listed] = documents(await penstock("targets", "--state", "disabled", "--json"))
    assert (listed["url"], listed["why"], listed["rate"]) == (url, "until noon", 12.5)
    shown = (await penstock("targets")).stdout
    assert all(text in shown for text in (url, "disabled", "until noon", "12.5/s"))
    assert "until noon" in (await penstock("targets", "--url", url)).stdout
    dead = documents(await penstock("callbacks", "list", "--target", url, "--json"))
    assert [one["id"] for one in dead] == ["msg_1", "msg_2", "msg_3"]
    assert "attempt 8 was the last" in (await penstock("callbacks", "list")).stdout
    assert (await penstock("callbacks", "replay")).exit_code == 2
    no_match = await penstock("callbacks", "replay", "msg_9")
    assert no_match.exit_code == 4
    assert "no dead callback matches" in no_match.stderr
    assert "`penstock callbacks list` shows dead callbacks" in no_match.stderr
    preview = (await penstock("callbacks", "replay", "--target", url, "--dry-run")).stdout
    assert "3 callbacks would be replayed" in preview
    assert f"msg_1 to {url}" in preview
    assert "3 of them would be held" in preview
    assert "2 of them are held" in (await penstock("callbacks", "replay", "msg_1", "msg_2")).stdout
    assert "0+0+2" in (await penstock("targets")).stdout
    assert "2 held callbacks will be sent" in (await penstock("targets", "enable", url)).stdout
    [answer] = documents(await penstock("targets", "limit", url, "none", "--json"))
    assert answer["target"]["rate"] is None
    unasked = await penstock("callbacks", "replay", "--task", "3")
    assert unasked.exit_code == 2
    assert "1 callback would be replayed: look at them with --dry-run" in unasked.stderr
    by_task = ("--task", "3", "--rate", "5", "--yes")
    [replayed] = documents(await penstock("callbacks", "replay", *by_task, "--json"))
    assert (replayed["count"], replayed["held"], replayed["dry_run"]) == (1, 0, False)
    states = {
        one["id"]: one["state"]
        for one in documents(await penstock("callbacks", "list", "--task", "3", "--json"))
    }
    assert states == {"msg_3": "pending"}
    empty = (await penstock("callbacks", "list")).stdout
    assert (
        empty
        == "no dead callbacks; --state pending or --state held lists callbacks in other states, --task ID all callbacks of a task\n"
    )
    assert (
        "no held callbacks match; --state"
        in (await penstock("callbacks", "list", "--state", "held", "--target", f"{url}#")).stdout
    )
    assert (await penstock("callbacks", "list", "--task", "9")).stdout.startswith(
        "task 9 has no such callbacks"
    )
    await connection.close()


async def test_the_namespace_option_selects_a_target(penstock: Invoke, database: str) -> None:
    """C8, O5: --namespace selects one of two targets at one address, else `default` is meant.
    Tables have a namespace column once another namespace has a target. An unknown namespace is
    rejected."""
    url = "https://shop.example/shared"
    assert (await penstock("types", "add", "acme--order")).exit_code == 0
    assert "is disabled" in (await penstock("targets", "disable", url, "--why", "of all")).stdout
    assert "namespace" not in (await penstock("targets")).stdout
    assert "namespace" not in (await penstock("targets", "--url", url)).stdout
    namespace = ("--namespace", "acme")
    unknown = await penstock("targets", "limit", url, "3", "--namespace", "gamma")
    assert unknown.exit_code == 4
    assert "there is no namespace gamma" in unknown.stderr
    assert (await penstock("targets", "enable", url, *namespace)).exit_code == 4
    [limited] = documents(await penstock("targets", "limit", url, "3", *namespace, "--json"))
    assert (limited["target"]["namespace"], limited["target"]["state"]) == ("acme", "normal")
    assert "is disabled" in (await penstock("targets", "disable", url, "--why", "ours", *namespace)).stdout
    assert "is enabled" in (await penstock("targets", "enable", url)).stdout
    heads, *rows = (await penstock("targets")).stdout.splitlines()
    assert heads.split()[:3] == ["target", "namespace", "state"]
    assert [row.split()[1:3] for row in rows if row.startswith(url)] == [
        ["acme", "disabled"],
        ["default", "normal"],
    ]
    listed = documents(await penstock("targets", "--url", url, "--json"))
    assert [one["namespace"] for one in listed] == ["acme", "default"]
    assert "ours" in (await penstock("targets", "--url", url, *namespace)).stdout
    [only] = documents(await penstock("targets", *namespace, "--json"))
    assert (only["namespace"], only["rate"]) == ("acme", 3.0)
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    try:
        await connection.execute(
            "INSERT INTO callback (id, namespace, target, task_id, body, state, due_at, finished_at) "
            "VALUES ('cb', 'acme', $1, 1, '', 'dead', now(), now())",
            url,
        )
    finally:
        await connection.close()
    assert documents(await penstock("callbacks", "list", "--namespace", "default", "--json")) == []
    no_match = await penstock("callbacks", "replay", "--target", url, "--yes")
    assert no_match.exit_code == 4
    assert "--namespace" in no_match.stderr
    assert (
        "1 callback replayed"
        in (await penstock("callbacks", "replay", "--target", url, *namespace, "--yes")).stdout
    )
