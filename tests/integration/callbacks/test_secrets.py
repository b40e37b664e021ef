"""Secrets of targets and namespaces: a real gateway, a real callbacks service, a real receiver.

`tests.support.webhooks` verifies by the text of the convention, and shares no code with the
service.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.callback_targets import (
    OLD_SECRET,
    SECRET,
    Bench,
    Call,
    Target,
    make_callback,
    target_server,
)
from tests.support.gateways import Answer, Caller, running_gateway
from tests.support.scraping import scrape
from tests.support.waiting import wait_until
from tests.support.webhooks import verifies, versions

from penstock.callbacks.secret_cache import SecretCache
from penstock.core.webhook_secrets import Scope, encode
from penstock.crypto import PrivateKey, generate_private_key
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import EVENTS, REVOKED
from penstock.local.ports import choose_port
from penstock.postgres import callback_secrets

KEY, NEW_KEY = (base64.b64encode(letter * 32).decode() for letter in (b"k", b"n"))
ACME, BETA = "acme--order", "beta--order"
OWN = encode("whsec_", b"own" * 10)
# Neither waits for a busy machine: the schedule of failed calls is short, and a call has its time.
QUICK: dict[str, Any] = {
    "callback_schedule_s": ("0.3",) * 50,
    "callback_timeout_s": 30.0,
    "callback_slow_s": 20.0,
    "encryption_keys": (KEY,),
}


class Numbers:
    """Ids of callbacks."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last


numbers = Numbers()


@pytest.fixture
async def gateway(platform: Bench, tmp_path: Path) -> AsyncIterator[Caller]:
    await create_topics(platform.kafka, [EVENTS, REVOKED])
    async with running_gateway(
        kafka=platform.kafka.kafka,
        prefix=platform.kafka.prefix,
        postgres=platform.postgres,
        objects=f"file://{tmp_path}",
        encryption_keys=(KEY,),
    ) as caller:
        await wait_until(caller.is_ready)
        for name in (ACME, BETA):
            assert (await caller.post("/types", {"name": name})).status == 201
        yield caller


async def called(platform: Bench, target: Target, type_name: str = ACME, path: str = "/hook") -> Call:
    """A call of a new callback to a target."""
    callback = make_callback(target.url + path, numbers.next(), type_name=type_name)
    await platform.enqueue(callback)
    await wait_until(lambda: callback.id in target.ids())
    return next(call for call in target.calls if call.id == callback.id)


async def create(gateway: Caller, **body: Any) -> dict[str, Any]:
    answer = await gateway.post("/targets/secrets", body)
    assert answer.status == 201, answer.body
    return dict(answer.body)


async def public_keys(gateway: Caller, **query: str) -> list[str]:
    async with gateway.session.get(gateway.url + "/targets/public-keys", params=query) as answer:
        assert answer.status == 200
        return [key["public_key"] for key in (await answer.json())["keys"]]


async def verified(
    platform: Bench, target: Target, *keys: str, not_by: tuple[str, ...] = (), **where: str
) -> None:
    """Waits until new calls are signed with exactly these keys."""

    async def so() -> bool:
        call = await called(platform, target, **where)
        audience = target.url + where.get("path", "/hook")
        return (
            len(versions(call.headers)) == len(keys)
            and all(verifies(call.headers, call.body, key) for key in keys)
            and all(verifies(call.headers, call.body, key, audience=audience) for key in keys)
            and not any(verifies(call.headers, call.body, key) for key in not_by)
        )

    await wait_until(so, what="signed with the keys")


async def test_the_narrowest_scope_with_secrets_signs(
    platform: Bench, gateway: Caller, target: Target
) -> None:
    """C7: a target's secret signs alone; then its namespace's, the deployment's, the setting's.

    A running service follows each change, and a revoked secret signs nothing any more.
    """
    async with platform.service(**QUICK):
        await verified(platform, target, SECRET)
        deployment = await create(gateway, namespace="*")
        await verified(platform, target, deployment["secret"], not_by=(SECRET,))
        namespace = await create(gateway, namespace="acme")
        await verified(platform, target, namespace["secret"], not_by=(SECRET, deployment["secret"]))
        # Of another namespace, and of another target of this one.
        await verified(platform, target, deployment["secret"], type_name=BETA)
        own = await create(gateway, namespace="acme", url=target.url + "/hook")
        everyone = (SECRET, deployment["secret"], namespace["secret"])
        await verified(platform, target, own["secret"], not_by=everyone)
        await verified(platform, target, namespace["secret"], path="/other", not_by=(own["secret"],))
        await verified(platform, target, deployment["secret"], type_name=BETA, not_by=(own["secret"],))
        for secret, following in (
            (own, namespace["secret"]),
            (namespace, deployment["secret"]),
            (deployment, SECRET),
        ):
            revoked = await gateway._call("DELETE", f"/targets/secrets/{secret['id']}")
            assert (revoked.status, revoked.body["state"]) == (200, "revoked")
            assert (await gateway._call("DELETE", f"/targets/secrets/{secret['id']}")).body == revoked.body
            again = await gateway.post(f"/targets/secrets/{secret['id']}/rotate", {})
            assert again.status == 409
            await verified(platform, target, following, not_by=(secret["secret"],))
    assert (await platform.states()).keys() == {"delivered"}


async def test_a_receiver_cannot_forge_to_another(platform: Bench, gateway: Caller, target: Target) -> None:
    """C7: what one receiver has verifies nothing at another, in the same namespace or in another.

    The receiver has its secret and the messages that it received. Neither its own signatures nor a
    message passed on verify at the other one.
    """
    async with platform.service(**QUICK), target_server() as victim:
        mine = await create(gateway, namespace="acme", url=target.url + "/hook")
        theirs = {
            ACME: await create(gateway, namespace="acme", url=victim.url + "/hook"),
            BETA: await create(gateway, namespace="beta"),
        }
        for type_name, secret in theirs.items():
            await verified(
                platform, victim, secret["secret"], type_name=type_name, not_by=(mine["secret"], SECRET)
            )
            stolen = await called(platform, target)
            assert verifies(stolen.headers, stolen.body, mine["secret"])
            assert not verifies(stolen.headers, stolen.body, secret["secret"])
            # A call of the other namespace to the same URL is signed for that namespace.
            same_url = await called(platform, target, type_name=BETA)
            assert not verifies(same_url.headers, same_url.body, mine["secret"])


async def test_one_key_for_all_is_bound_to_the_url(platform: Bench, gateway: Caller, target: Target) -> None:
    """C7: with one ed25519 key for all, a message that one receiver got and passes on is refused by
    a receiver that verifies the audience. Its namespace's and the deployment's keys are served."""
    key = await create(gateway, namespace="*", scheme="v1a")
    assert key["secret"] is None
    async with platform.service(**QUICK), target_server() as victim:
        await verified(platform, victim, key["public_key"])
        stolen = await called(platform, target)
        assert verifies(stolen.headers, stolen.body, key["public_key"])
        assert verifies(stolen.headers, stolen.body, key["public_key"], audience=target.url + "/hook")
        assert not verifies(stolen.headers, stolen.body, key["public_key"], audience=victim.url + "/hook")
    for query in ({}, {"namespace": "acme"}, {"namespace": "acme", "url": target.url + "/hook"}):
        assert await public_keys(gateway, **query) == [key["public_key"]]


async def test_a_rotation_has_both_signatures(platform: Bench, gateway: Caller, target: Target) -> None:
    """C7: during the overlap both secrets verify, of either scheme; then the new one alone."""
    where = {"namespace": "acme", "url": target.url + "/hook"}
    async with platform.service(**QUICK):
        for scheme in ("v1", "v1a"):
            old = await create(gateway, **where, scheme=scheme)
            shown = "secret" if scheme == "v1" else "public_key"
            await verified(platform, target, old[shown], not_by=(SECRET,))
            answer = await gateway.post(f"/targets/secrets/{old['id']}/rotate", {"overlap_s": 3600})
            assert answer.status == 201
            new = answer.body
            assert (new["replaces"]["id"], new["replaces"]["state"]) == (old["id"], "replaced")
            await verified(platform, target, new[shown], old[shown])
            if scheme == "v1a":
                assert await public_keys(gateway, **where) == [new[shown], old[shown]]
            again = await gateway.post(f"/targets/secrets/{old['id']}/rotate", {})
            assert again.status == 409
            # A second rotation with a short overlap: its end needs no notification.
            answer = await gateway.post(f"/targets/secrets/{new['id']}/rotate", {"overlap_s": 0.5})
            newest = answer.body
            await gateway._call("DELETE", f"/targets/secrets/{old['id']}")
            await verified(platform, target, newest[shown], not_by=(old[shown], new[shown]))
            await gateway._call("DELETE", f"/targets/secrets/{newest['id']}")
            await verified(platform, target, SECRET)


async def test_a_new_scope_can_overlap_with_the_wider_one(
    platform: Bench, gateway: Caller, target: Target
) -> None:
    """C7: a receiver moves from the setting's secret to its own without a rejected call."""
    async with platform.service(**QUICK):
        own = await create(gateway, namespace="acme", url=target.url + "/hook", overlap_s=3600)
        await verified(platform, target, own["secret"], SECRET)
        await platform.connection.execute("UPDATE callback_secret SET wider_until = now() + '1 s'")
        await platform.connection.execute(
            "SELECT pg_notify('penstock_callback_secrets', namespace || ' ' || url) FROM callback_secret"
        )
        await verified(platform, target, own["secret"], not_by=(SECRET,))


async def test_both_schemes_sign_side_by_side(platform: Bench, gateway: Caller, target: Target) -> None:
    """C7: a namespace with a symmetric secret and a key pair signs with both."""
    async with platform.service(**QUICK):
        shared = await create(gateway, namespace="acme", secret=OWN)
        assert shared["secret"] is None
        private = generate_private_key()
        pair = await create(gateway, namespace="acme", scheme="v1a", secret=private)
        assert pair["public_key"] == PrivateKey(private).public
        await verified(platform, target, OWN, pair["public_key"])


async def test_secrets_are_encrypted_and_shown_once(platform: Bench, gateway: Caller) -> None:
    """C7: no later answer and no row has a secret, and the ciphertext is bound to its row."""
    shown = [
        await create(gateway, namespace="acme"),
        await create(gateway, namespace="acme", secret=OWN),
        await create(gateway, namespace="beta", scheme="v1a"),
    ]
    listed = (await gateway.get("/targets/secrets")).body["secrets"]
    assert [secret["id"] for secret in listed] == [
        secret["id"] for secret in sorted(shown, key=lambda secret: (secret["namespace"], secret["id"]))
    ]
    rotated = await gateway.post(f"/targets/secrets/{shown[0]['id']}/rotate", {})
    revoked = await gateway._call("DELETE", f"/targets/secrets/{shown[0]['id']}")
    answers = [listed, shown[1], shown[2], rotated.body["replaces"], revoked.body]
    rows = [tuple(row) for row in await platform.connection.fetch("SELECT * FROM callback_secret")]
    for secret in (shown[0]["secret"], OWN):
        raw = base64.b64decode(secret.removeprefix("whsec_"))
        assert secret.removeprefix("whsec_") not in repr(answers)
        assert secret not in repr(rows)
        assert not any(raw in value for row in rows for value in row if isinstance(value, bytes))
    assert "whsk_" not in repr([*answers, *rows])


async def test_a_row_moved_to_another_target_signs_nothing(
    platform: Bench, gateway: Caller, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """C7: a secret whose row was changed outside Penstock cannot be used, and no wider secret takes
    its place: the callback fails with the reason, and is delivered once the secret is mended."""
    secret = await create(gateway, namespace="beta")
    await platform.connection.execute("UPDATE callback_secret SET namespace = 'acme'")
    port = choose_port()
    async with platform.service(**QUICK, metrics_port=port):
        callback = make_callback(target.url + "/hook", numbers.next(), type_name=ACME)
        await platform.enqueue(callback)

        async def failed() -> bool:
            error = (await platform.rows())[callback.id]["error"]
            return error is not None and secret["id"] in error

        await wait_until(failed)
        assert target.calls == []
        assert (await scrape(port))[("penstock_callback_secrets_unusable",)] == 1
        assert [r.event for r in caplog.records if getattr(r, "event", "") == "callback_secret_unusable"]
        await gateway._call("DELETE", f"/targets/secrets/{secret['id']}")
        await wait_until(platform.all_delivered)
        assert (await scrape(port))[("penstock_callback_secrets_unusable",)] == 0
    assert verifies(target.calls[0].headers, target.calls[0].body, SECRET)


async def test_encryption_keys_are_rotated(
    platform: Bench, gateway: Caller, target: Target, tmp_path: Path
) -> None:
    """C7: with a new first key both keys decrypt; after `reencrypt` nothing needs the old one."""
    secret = await create(gateway, namespace="acme")
    async with platform.service(**{**QUICK, "encryption_keys": (NEW_KEY, KEY)}):
        await verified(platform, target, secret["secret"])
    async with running_gateway(
        kafka=platform.kafka.kafka,
        prefix=platform.kafka.prefix,
        postgres=platform.postgres,
        objects=f"file://{tmp_path}",
        encryption_keys=(NEW_KEY, KEY),
    ) as second:
        for expected in (1, 0):
            answer = await second.post("/targets/secrets/reencrypt")
            assert (answer.status, answer.body["reencrypted"]) == (200, expected)
        [listed] = (await second.get("/targets/secrets")).body["secrets"]
        assert listed["encryption_key"] == answer.body["encryption_key"]
    async with platform.service(**{**QUICK, "encryption_keys": (NEW_KEY,)}):
        await verified(platform, target, secret["secret"])
    # The first gateway lacks the new key.
    assert (await gateway.post("/targets/secrets/reencrypt")).status == 409


async def test_a_secret_by_reference_follows_its_file(
    platform: Bench, gateway: Caller, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: a variable or file has the secret; a changed file signs anew without a request, and two
    secrets in it both sign. Without it, no call is made."""
    monkeypatch.setattr("penstock.callbacks.secret_cache.REFERENCES_EVERY_S", 0.2)
    folder = tmp_path / "mounted"
    folder.mkdir()
    monkeypatch.setenv("PENSTOCK_SECRET_ACME", OWN)
    by_variable = await create(gateway, namespace="acme", reference="env:ACME")
    assert (by_variable["reference"], by_variable["secret"]) == ("env:ACME", None)
    pair = generate_private_key()
    await create(gateway, namespace="beta", reference="file:beta")
    async with platform.service(**QUICK, callback_secrets_dir=str(folder)):
        await verified(platform, target, OWN)
        callback = make_callback(target.url + "/hook", numbers.next(), type_name=BETA)
        await platform.enqueue(callback)

        async def failed() -> bool:
            error = (await platform.rows())[callback.id]["error"]
            return error is not None and "file:beta" in error

        await wait_until(failed)
        (folder / "beta").write_text(OLD_SECRET + "\n")
        await wait_until(platform.all_delivered)
        await verified(platform, target, OLD_SECRET, type_name=BETA)
        (folder / "beta").write_text(f"{OWN}\n{OLD_SECRET}\n")
        await verified(platform, target, OWN, OLD_SECRET, type_name=BETA)
        (folder / "pair").write_text(pair)
        answer = await gateway.post(
            "/targets/secrets",
            {"namespace": "beta", "url": target.url + "/pair", "scheme": "v1a", "reference": "file:pair",
             "public_key": PrivateKey(pair).public},
        )  # fmt: skip
        assert answer.status == 201
        await verified(platform, target, PrivateKey(pair).public, type_name=BETA, path="/pair")


@pytest.mark.long
async def test_changes_survive_a_killed_service(
    platform: Bench, gateway: Caller, target: Target, tmp_path: Path
) -> None:
    """C7: secrets that were created, rotated and revoked while the service was killed sign right
    from the next start."""
    where = {"namespace": "acme", "url": target.url + "/hook"}
    environ = {"encryption_keys": KEY, "callback_schedule_s": "1,1,1"}
    old = await create(gateway, **where)
    async with platform.process(tmp_path, **environ) as process:
        await verified(platform, target, old["secret"], not_by=(SECRET,))
        process.kill()
        await process.wait()
    new = (await gateway.post(f"/targets/secrets/{old['id']}/rotate", {"overlap_s": 0})).body
    async with platform.process(tmp_path, **environ):
        call = await called(platform, target)
        assert verifies(call.headers, call.body, new["secret"])
        assert not verifies(call.headers, call.body, old["secret"])


@pytest.mark.long
async def test_a_change_while_the_session_is_lost_is_read(
    platform: Bench, gateway: Caller, target: Target, tmp_path: Path
) -> None:
    """C7: a service whose session for notifications has ended reads what changed meanwhile: a
    secret that was revoked without a notification that it could receive signs nothing."""
    secret = await create(gateway, namespace="acme")
    # A call that the lost session interrupts is repeated after the horizon.
    environ = {"encryption_keys": KEY, "callback_timeout_s": "3"}
    async with platform.process(tmp_path, **environ):
        await verified(platform, target, secret["secret"])
        async with platform.connection.transaction():
            await platform.connection.execute("DELETE FROM callback_secret")
            ended = await platform.connection.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE application_name LIKE '%callbacks requeuer%' AND datname = current_database()"
            )
        assert ended == 1
        await verified(platform, target, SECRET, not_by=(secret["secret"],))


async def test_a_change_during_a_load_is_read_again(
    platform: Bench, gateway: Caller, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: a secret that is created after a load has read its scope, and before the load has ended,
    signs: the notification arrives before the scope is in memory."""
    read = callback_secrets.of_scopes
    created: list[dict[str, Any]] = []

    async def read_then_change(executor: Any, scopes: Any) -> Any:
        rows = await read(executor, scopes)
        if not created:
            created.append({})
            created[0] = await create(gateway, namespace="acme")
            # Behind its notification, on the same connection of the service.
            await wait_until(lambda: notified)
        return rows

    notified: list[str] = []
    invalidate = SecretCache.invalidate

    def record(self: SecretCache, payload: str) -> None:
        invalidate(self, payload)
        notified.append(payload)

    monkeypatch.setattr(callback_secrets, "of_scopes", read_then_change)
    monkeypatch.setattr(SecretCache, "invalidate", record)
    async with platform.service(**QUICK):
        await called(platform, target)
        await verified(platform, target, created[0]["secret"], not_by=(SECRET,))


async def test_unique_urls_read_no_secrets_of_targets(
    platform: Bench, gateway: Caller, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: in a namespace without secrets of single targets, a URL for each task costs no query."""
    scopes_read: list[Scope] = []
    read = callback_secrets.of_scopes

    async def record(executor: Any, scopes: Any) -> Any:
        scopes_read.extend(scopes)
        return await read(executor, scopes)

    monkeypatch.setattr(callback_secrets, "of_scopes", record)
    await create(gateway, namespace="acme")
    await create(gateway, namespace="beta", url=target.url + "/0")
    async with platform.service(**QUICK):
        for type_name in (ACME, BETA):
            for number in range(10):
                await called(platform, target, type_name=type_name, path=f"/{number}")
    assert {scope for scope in scopes_read if scope.namespace == "acme"} == {Scope("acme")}
    assert len({scope for scope in scopes_read if scope.namespace == "beta"}) == 11


async def refused(gateway: Caller, status: int, pointer: str | None, **body: Any) -> Answer:
    answer = await gateway.post("/targets/secrets", body)
    assert answer.status == status, answer.body
    if pointer is not None:
        assert answer.pointers == [pointer]
    return answer


async def test_wrong_requests_are_refused(platform: Bench, gateway: Caller) -> None:
    """C7: each wrong field is named, and no answer quotes a secret."""
    wrong = encode("whsec_", b"short")
    assert wrong not in repr((await refused(gateway, 422, "/secret", secret=wrong)).body)
    await refused(gateway, 422, "/secret", secret=OWN, scheme="v1a")
    await refused(gateway, 422, "/secret", secret=generate_private_key())
    await refused(gateway, 422, "/reference", reference="file:../postgres")
    await refused(gateway, 422, "/reference", reference="env:A", secret=OWN)
    await refused(gateway, 422, "/public_key", reference="env:A", scheme="v1a")
    await refused(gateway, 422, "/public_key", reference="env:A", public_key="whpk_AAAA")
    await refused(gateway, 422, "/public_key", reference="env:A", scheme="v1a", public_key="whpk_AAAA")
    await refused(gateway, 422, "/public_key", scheme="v1a", public_key="whpk_AAAA")
    await refused(gateway, 422, "/url", url="ftp://files.example/x")
    await refused(gateway, 422, "/url", url="https://a.example/", namespace="*")
    await refused(gateway, 422, None, scheme="v2")
    await refused(gateway, 404, None, namespace="nobody")
    for _ in range(4):
        await create(gateway, namespace="acme")
    await refused(gateway, 409, None, namespace="acme")
    for method, path in (("DELETE", ""), ("POST", "/rotate")):
        more = {} if method == "DELETE" else {"json": {}}
        answer = await gateway._call(method, f"/targets/secrets/{'0' * 16}{path}", **more)
        assert answer.status == 404


async def test_without_an_encryption_key_only_references_are_stored(platform: Bench, tmp_path: Path) -> None:
    """C7: a gateway without a key stores no secret, and says what to set."""
    async with running_gateway(
        kafka=platform.kafka.kafka,
        prefix=platform.kafka.prefix,
        postgres=platform.postgres,
        objects=f"file://{tmp_path}",
    ) as gateway:
        answer = await refused(gateway, 409, None)
        assert "PENSTOCK_ENCRYPTION_KEYS" in answer.body["detail"]
        await create(gateway, reference="env:A")
