"""The object store: what is no store is refused when a service starts, and how much it takes."""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.errors import CorruptObject, ObjectsUnavailable, SettingsError, TooLarge
from penstock.objects import ObjectStore
from penstock.settings import Kafka


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://x", "Unable to recognise URL"),
        ("nothing", "relative URL"),
        ("s3://", "Unable to recognise URL"),
        ("file://relative/folder", "Unable to recognise URL"),
        ("file:///proc/nothing/here", "No such file or directory"),
        ("file://[x", "Invalid IPv6 URL"),
    ],
)
def test_an_invalid_store_is_a_settings_error(url: str, words: str) -> None:
    """T4, O8: the error is one line, names the setting and comes at the start."""
    with pytest.raises(SettingsError) as refused:
        ObjectStore(url)
    message = str(refused.value)
    assert words in message
    assert "set PENSTOCK_OBJECTS to file:///FOLDER or s3://" in message
    assert "\n" not in message


def test_a_file_in_place_of_the_folder_is_an_outage(tmp_path: Path) -> None:
    """T4, O2: a process that starts during the outage waits for the store, as the others do."""
    (tmp_path / "objects").write_text("not a folder")
    with pytest.raises(ObjectsUnavailable, match="is not a folder"):
        ObjectStore(f"file://{tmp_path}/objects")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://nowhere.invalid:9000"])
async def test_an_outage_is_no_slow_store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T4, S11: a store that refuses connections, or whose name does not resolve, is away within
    seconds. The library alone would try for three minutes."""
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "r"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT", endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    store = ObjectStore("s3://bucket/prefix")
    with pytest.raises(ObjectsUnavailable, match="after 2 retries"):
        await store.check_in(Context.encode("x" * 5_000), "default")


def test_there_is_no_store_by_default() -> None:
    """T4: a worker with a local default folder could not find contexts of other processes."""
    with pytest.raises(SettingsError, match=r"objects is not set.*PENSTOCK_OBJECTS"):
        ObjectStore(Kafka.load({}).objects)


def test_a_folder_without_write_permission_is_a_settings_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T4: the error comes at the start. It is simulated, because root may write anywhere."""
    monkeypatch.setattr("penstock.objects.os.access", lambda *_: False)
    with pytest.raises(SettingsError, match="cannot be read and written"):
        ObjectStore(f"file://{tmp_path}")


async def test_a_value_far_above_the_limit_of_submissions_is_kept(tmp_path: Path) -> None:
    """T4: what handlers return goes through the store, so that no record limits it;
    docs/how-to/large-contexts.md promises that."""
    store = ObjectStore(f"file://{tmp_path}")
    value = "x" * 2_000_000
    kept = await store.check_in(Context.encode(value), "default")
    assert kept.ref is not None
    assert len(str(kept.to_wire())) < 300
    assert (await store.check_out(kept, "default")).decode() == value


def reference(data: bytes, **changed: Any) -> Context:
    ref = ObjectRef.of(data)
    fields = {"key": ref.key, "sha256": ref.sha256, "size": ref.size, **changed}
    return Context(ContentType.JSON, ref=ObjectRef(**fields))


def put(folder: Path, key: str, data: bytes) -> None:
    (folder / key).parent.mkdir(parents=True, exist_ok=True)
    (folder / key).write_bytes(data)


@pytest.mark.parametrize(
    "key",
    [
        "history/2026-01-01/part-0",
        "contexts/00/other",
        "contexts/acme/00/other",
        "contexts/default/" + "00/" + "0" * 64,
        "contexts/a/b/00/" + "0" * 64,
        "contexts/../00/" + "0" * 64,
        "a//b",
        "../x",
        "a\0b",
        "k" * 300,
        "./contexts/x",
        "",
        "/etc/passwd",
    ],
)
async def test_no_other_object_than_the_digests_is_read(key: str, tmp_path: Path) -> None:
    """T4, O5: a reference cannot lead to the archive, to another namespace's objects or out of the
    store, and the error tells nothing of what is there."""
    store = ObjectStore(f"file://{tmp_path}")
    secret = b"s" * 12_345
    put(tmp_path, "history/2026-01-01/part-0", secret)
    digest = hashlib.sha256(secret).hexdigest()
    with pytest.raises(CorruptObject, match="not the key of a context") as refused:
        await store.check_out(reference(b"{}", key=key, sha256=digest, size=len(secret)), "default")
    assert "12,345" not in str(refused.value).replace(",", ",")
    assert await store.answers()


async def test_an_object_belongs_to_a_namespace(tmp_path: Path) -> None:
    """T4, O5: the same content of two namespaces is two objects, and none is read for the other
    one."""
    store = ObjectStore(f"file://{tmp_path}")
    large = Context(ContentType.TEXT, b"x" * 5_000)
    acme, beta, default = [await store.check_in(large, name) for name in ("acme", "beta", "default")]
    assert len({context.ref for context in (acme, beta, default)}) == 3
    assert await store.check_out(acme, "acme") == large
    for namespace in ("beta", "default"):
        with pytest.raises(CorruptObject, match="another namespace"):
            await store.check_out(acme, namespace)
    with pytest.raises(CorruptObject, match="another namespace"):
        await store.check_out(default, "acme")


async def test_an_object_is_not_read_beyond_the_size_of_its_reference(tmp_path: Path) -> None:
    """T4: the size is compared before the object is read: a file of 1 TiB, which is sparse, is
    refused at once."""
    store = ObjectStore(f"file://{tmp_path}")
    small = reference(b"x" * 5_000)
    assert small.ref is not None
    put(tmp_path, small.ref.key, b"")
    os.truncate(tmp_path / small.ref.key, 2**40)
    with pytest.raises(CorruptObject, match="does not have the 5,000 bytes of its reference") as refused:
        await store.check_out(small, "default")
    assert str(2**40) not in str(refused.value).replace(",", "")


@pytest.mark.parametrize("size", [-1, "5", None, 2.5, True])
async def test_a_size_that_is_no_size_is_refused(size: Any, tmp_path: Path) -> None:
    """T4: a row may have any JSON value there."""
    store = ObjectStore(f"file://{tmp_path}")
    with pytest.raises(CorruptObject, match="not a size"):
        await store.check_out(reference(b"x" * 5_000, size=size), "default")


async def test_a_process_may_limit_what_it_holds_in_memory(tmp_path: Path) -> None:
    """T4: a gateway refuses a large object by its reference, and reads nothing."""
    store = ObjectStore(f"file://{tmp_path}")
    with pytest.raises(TooLarge, match="5,000 bytes; 4,999 is the limit"):
        await store.check_out(reference(b"x" * 5_000), "default", limit_bytes=4_999)


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        (ContentType.JSON, b'1},{"id":2,"context":3'),
        (ContentType.JSON, b""),
        (ContentType.JSON, b"NaN"),
        (ContentType.JSON, b"[" * 250 + b"]" * 250),
        (ContentType.TEXT, b"\xff"),
    ],
)
async def test_an_object_is_what_its_content_type_says(
    content_type: ContentType, data: bytes, tmp_path: Path
) -> None:
    """T6: the bytes of an object are copied into the answers of a gateway. They must not begin
    another task there."""
    store = ObjectStore(f"file://{tmp_path}")
    ref = ObjectRef.of(data)
    put(tmp_path, ref.key, data)
    with pytest.raises(CorruptObject):
        await store.check_out(Context(content_type, ref=ref), "default")


@pytest.mark.parametrize("fault", ["removed", "a file", "empty"])
async def test_a_folder_that_is_away_is_an_outage(tmp_path: Path, fault: str) -> None:
    """T4, S11: a local store whose folder is not mounted, or was replaced, is away; its objects are
    not called missing, and no folder is created in its place. The error names the store."""
    folder = tmp_path / "objects"
    store = ObjectStore(f"file://{folder}")
    kept = await store.check_in(Context.encode("x" * 5000), "default")
    folder.rename(tmp_path / "away")
    if fault == "a file":
        folder.touch()
    if fault == "empty":
        folder.mkdir()
    with pytest.raises(ObjectsUnavailable, match=r"^the object store [^\n]*$"):
        await store.check_out(kept, "default")
    if fault != "empty":  # which may be a new store
        with pytest.raises(ObjectsUnavailable, match="the object store is away"):
            await store.check_in(Context.encode("y" * 5000), "default")
        with pytest.raises(ObjectsUnavailable):
            await store.probe()
    if folder.is_dir():
        folder.rmdir()
    folder.unlink(missing_ok=True)
    (tmp_path / "away").rename(folder)
    assert (await store.check_out(kept, "default")).decode() == "x" * 5000
    await store.probe()


@contextmanager
def full() -> Iterator[None]:
    """No file of this process can have a byte; a superuser's neither, unlike without permission."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_store_that_cannot_be_written_is_away(tmp_path: Path) -> None:
    """T4, O4: a store that is full or read-only answers reads. Its probe writes and sees that, and
    errors name the store and the fault, and not the internals of the library."""
    store = ObjectStore(f"file://{tmp_path}")
    await store.check_in(Context.encode("x" * 5000), "default")
    await store.probe()
    errors = []
    with full():
        for attempt in (store.probe(), store.check_in(Context.encode("y" * 5000), "default")):
            try:
                await attempt
            except ObjectsUnavailable as error:
                errors.append(str(error))
    assert errors == [
        f"the object store file://{tmp_path} cannot be written: File too large",
        f"the object store file://{tmp_path} does not store 5,002 bytes: File too large",
    ]
    await store.probe()


async def test_a_probe_does_not_make_an_empty_folder_a_store(tmp_path: Path) -> None:
    """T4: contexts are missing from a folder that is not mounted, and not lost. The probe must not
    make it look like a store."""
    folder = tmp_path / "objects"
    store = ObjectStore(f"file://{folder}")
    kept = await store.check_in(Context.encode("x" * 5000), "default")
    folder.rename(tmp_path / "away")
    folder.mkdir()
    await store.probe()
    with pytest.raises(ObjectsUnavailable, match="is not a folder"):
        await store.check_out(kept, "default")
