"""The object store: what is no store is refused when a service starts, and how much it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.contracts.context import Context
from penstock.errors import SettingsError
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
    kept = await store.check_in(Context.encode(value))
    assert kept.ref is not None
    assert len(str(kept.to_wire())) < 300
    assert (await store.check_out(kept)).decode() == value
