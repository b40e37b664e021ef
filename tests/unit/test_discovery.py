"""A local deployment is found by its data directory: by workers, services and the command line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.client import SyncClient
from penstock.discovery import Addresses, local_environment, running
from penstock.errors import SettingsError
from penstock.local.state import DataDir
from penstock.settings import Platform
from penstock.worker import Worker


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory without a deployment, and an environment without addresses."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in list(os.environ):
        if name.startswith("PENSTOCK_") and not name.startswith("PENSTOCK_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("penstock.cli.gateway.PATIENCE_S", 0.0)


@pytest.fixture
def unused_address() -> Iterator[str]:
    """An address without a listener."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def deployed(place: Path, unused_address: str) -> DataDir:
    """A data directory as `penstock up` leaves it while it runs; none of its servers answers."""
    owned = DataDir(place)
    addresses = Addresses(
        pid=os.getpid(),
        gateway=f"http://{unused_address}",
        kafka=unused_address,
        postgres=f"postgresql://u:secret@{unused_address}/d",
        prefix="x.",
        objects=f"file://{place}/objects",
    )
    owned.publish(addresses)
    assert running(place) == addresses
    return owned


def test_addresses_of_a_killed_owner_are_ignored_while_the_next_one_starts(unused_address: str) -> None:
    """O1: the new owner holds the lock and has not published its addresses yet."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    place = Path(".penstock")
    owned = deployed(place, unused_address)
    state = place / "state.json"
    state.write_text(state.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {ended.pid}'))
    assert f'"pid": {ended.pid}' in state.read_text()
    (place / "lock").write_text(str(ended.pid))
    assert running(place) is None
    owned.close()


def test_worker_and_client_find_the_deployment_of_their_directory(unused_address: str) -> None:
    """O1: they find it without settings."""
    owned = deployed(Path(".penstock"), unused_address)
    found = Worker().settings
    assert (found.kafka, found.prefix) == (unused_address, "x.")
    assert found.objects == f"file://{Path('.penstock')}/objects"
    assert SyncClient().url == f"http://{unused_address}"
    owned.close()


def test_without_a_deployment_the_defaults_apply() -> None:
    """O1: a directory that never had a deployment."""
    assert Worker().settings.kafka == "127.0.0.1:9092"
    assert SyncClient().url == "http://127.0.0.1:8420"
    assert local_environment() == {}


@pytest.mark.parametrize("verb", [["list"], ["tasks", "cancel", "--type", "t"], ["migrate"], ["topics"]])
def test_a_command_asks_no_deployment_that_nothing_names(
    verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O1: any deployment may listen at the default addresses. Commands refuse, as workers do, and
    say how to name one; a command that needs no server works."""
    outcome = CliRunner().invoke(cli, verb)
    assert outcome.exit_code == 6, outcome.output
    assert f"no `penstock up` runs in {Path('.penstock').absolute()}" in outcome.stderr
    for word in ("--data-dir or PENSTOCK_DATA_DIR", "--gateway or PENSTOCK_GATEWAY", "PENSTOCK_KAFKA"):
        assert word in outcome.stderr
    assert CliRunner().invoke(cli, ["topics", "acls"]).exit_code == 0
    monkeypatch.setenv("PENSTOCK_GATEWAY", "http://127.0.0.1:1")
    monkeypatch.setenv("PENSTOCK_POSTGRES", "postgresql://127.0.0.1:1/x")
    monkeypatch.setenv("PENSTOCK_KAFKA", "127.0.0.1:1")
    assert CliRunner().invoke(cli, verb).exit_code == 5


def test_a_deployment_that_starts_is_not_stopped(unused_address: str) -> None:
    """O1: its process holds the lock before it has addresses, and after it has removed them."""
    owned = DataDir(Path(".penstock"))
    directory = Path(".penstock").absolute()
    for arguments in (["list"], ["list", "--data-dir", ".penstock"], ["check"]):
        outcome = CliRunner().invoke(cli, arguments)
        assert outcome.exit_code == 6
        assert f"the deployment in {directory} is starting or stopping" in outcome.stderr
        assert "start it" not in outcome.stderr
    for error in (SyncClient, lambda: Worker().settings):
        with pytest.raises(SettingsError, match="is starting or stopping"):
            error()
    outcome = CliRunner().invoke(cli, ["status"])
    assert outcome.exit_code == 1
    assert f"(process {os.getpid()}) is starting or stopping" in outcome.stdout
    assert f'"process":{os.getpid()}' in CliRunner().invoke(cli, ["status", "--json"]).stdout
    assert CliRunner().invoke(cli, ["list", "--gateway", f"http://{unused_address}"]).exit_code == 5
    owned.close()


@pytest.mark.parametrize("state", [b"{bad", b"[]", b'{"pid": 1}', b"\xff\xfe", b""])
def test_broken_addresses_are_an_error_while_a_deployment_runs(state: bytes) -> None:
    """O1: the error names the file; without a running deployment no command reads it."""
    owned = DataDir(Path(".penstock"))
    (owned.path / "state.json").write_bytes(state)
    for arguments in (["list"], ["status"], ["types", "--data-dir", ".penstock"]):
        outcome = CliRunner().invoke(cli, arguments)
        assert outcome.exit_code == 6, outcome.output
        assert f"{owned.path / 'state.json'} has no addresses of a deployment" in outcome.stderr
    owned.close()
    (owned.path / "state.json").write_bytes(state)
    assert "is stopped" in CliRunner().invoke(cli, ["list"]).stderr


def test_status_prints_no_password(unused_address: str) -> None:
    """O8: scripts log what it prints."""
    owned = deployed(Path(".penstock"), unused_address)
    for arguments in (["status"], ["status", "--json"]):
        outcome = CliRunner().invoke(cli, arguments)
        assert unused_address in outcome.stdout
        assert "secret" not in outcome.stdout
    owned.close()


def test_a_stopped_deployment_is_an_error(unused_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: another deployment may listen at the default addresses. Worker, client and every verb
    refuse and name the directory. They accept given servers or a given gateway."""
    deployed(Path(".penstock"), unused_address).close()
    stopped = rf"the deployment in {Path('.penstock').absolute()} is stopped: start it with `penstock up`"
    with pytest.raises(SettingsError, match=stopped):
        SyncClient()
    with pytest.raises(SettingsError, match=stopped):
        _ = Worker().settings
    for verb in (["list"], ["tasks", "cancel", "--type", "t"], ["check"], ["migrate"], ["topics"]):
        outcome = CliRunner().invoke(cli, verb)
        assert outcome.exit_code == 6, outcome.output
        assert "is stopped: start it with `penstock up`" in outcome.stderr

    assert SyncClient("http://127.0.0.1:1").url == "http://127.0.0.1:1"
    assert Platform.load(kafka=unused_address).kafka == unused_address
    assert CliRunner().invoke(cli, ["topics", "--kafka", unused_address]).exit_code == 5
    assert CliRunner().invoke(cli, ["list", "--gateway", "http://127.0.0.1:1"]).exit_code == 5
    monkeypatch.setenv("PENSTOCK_GATEWAY", "http://127.0.0.1:1")
    assert CliRunner().invoke(cli, ["list"]).exit_code == 5
    assert SyncClient().url == "http://127.0.0.1:1"


def test_a_worker_finds_the_deployment_of_its_environment(
    unused_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O1: PENSTOCK_DATA_DIR names it; a directory without a deployment is an error."""
    owned = deployed(tmp_path / "data", unused_address)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    assert Worker().settings.kafka == unused_address
    owned.close()
    with pytest.raises(
        SettingsError, match=r"no `penstock up` of this user runs in .*/data.*PENSTOCK_DATA_DIR"
    ):
        _ = Worker().settings


@pytest.mark.parametrize("name", ["kafka", "postgres", "prefix", "objects"])
def test_the_environment_and_keywords_win_as_a_whole(
    unused_address: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O1: with one address set, no address comes from a local deployment."""
    owned = deployed(Path(".penstock"), unused_address)
    given = Platform.load(**{name: "given"})
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", "given")
    for settings in (given, Platform.load()):
        others = {"kafka", "postgres", "prefix", "objects"} - {name}
        assert getattr(settings, name) == "given"
        assert all(getattr(settings, other) == getattr(Platform(), other) for other in others)
    owned.close()


def test_check_says_where_it_looked(
    unused_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O8: the origin of each address, and how to name a deployment; --data-dir wins over the
    environment."""
    owned = deployed(tmp_path / "data", unused_address)
    monkeypatch.setenv("PENSTOCK_POSTGRES", "postgresql://u@127.0.0.1:1/elsewhere")
    for verb in ("check", "migrate"):
        outcome = CliRunner().invoke(cli, [verb, "--data-dir", str(tmp_path / "data")])
        assert outcome.exit_code == 5, outcome.stderr
        assert unused_address in outcome.stderr
        assert f"postgres is that of the deployment in {tmp_path / 'data'}" in outcome.stderr
        assert "secret" not in outcome.stderr
        assert "Unclosed" not in outcome.stderr

    outcome = CliRunner().invoke(cli, ["check"])
    assert outcome.exit_code == 5
    assert "127.0.0.1:1/elsewhere" in outcome.stderr
    assert "kafka is the default; postgres is the value of PENSTOCK_POSTGRES" in outcome.stderr
    assert f"no `penstock up` runs in {Path('.penstock').absolute()}" in outcome.stderr
    assert "--data-dir or PENSTOCK_DATA_DIR" in outcome.stderr

    outcome = CliRunner().invoke(cli, ["topics", "--kafka", unused_address])
    assert outcome.exit_code == 5
    assert "kafka is the value of --kafka" in outcome.stderr
    assert "no `penstock up`" not in outcome.stderr
    owned.close()


@pytest.mark.parametrize(
    "verb", [["check"], ["migrate"], ["topics"], ["list"], ["types"], ["types", "add", "a"]]
)
def test_a_directory_without_a_running_deployment_is_an_error(verb: list[str], tmp_path: Path) -> None:
    """O8: a verb must not silently use the default addresses."""
    outcome = CliRunner().invoke(cli, [*verb, "--data-dir", str(tmp_path / "data")])
    assert outcome.exit_code == 6
    assert f"no `penstock up` of this user runs in {tmp_path / 'data'}" in outcome.stderr


def test_the_gateway_of_a_data_directory_is_asked(
    unused_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O8: --gateway, then --data-dir, then the environment; also where a group's option stands
    before its verb."""
    owned = deployed(tmp_path / "data", unused_address)
    monkeypatch.setenv("PENSTOCK_GATEWAY", "http://127.0.0.1:1")
    there = ["--data-dir", str(tmp_path / "data")]
    for arguments in (
        ["list", *there],
        ["types", *there],
        ["types", *there, "add", "a"],
        ["types", "add", "a", *there],
    ):
        outcome = CliRunner().invoke(cli, arguments)
        assert outcome.exit_code == 5
        assert unused_address in outcome.stderr
    assert "127.0.0.1:1 " in CliRunner().invoke(cli, ["list"]).stderr
    assert (
        "127.0.0.1:2 " in CliRunner().invoke(cli, ["list", *there, "--gateway", "http://127.0.0.1:2"]).stderr
    )
    owned.close()


def test_a_directory_with_other_files_is_no_data_directory(tmp_path: Path) -> None:
    """O8: `up --data-dir` refuses a folder of other files and leaves it as it is; --fresh would
    delete in it."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("mine")
    outcome = CliRunner().invoke(cli, ["up", "--fresh", "--yes", "--data-dir", str(tmp_path / "docs")])
    assert outcome.exit_code == 6
    assert f"{tmp_path / 'docs'} has files and is no data directory" in outcome.output
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["index.md"]
    # The demo keeps its files in the default directory.
    (tmp_path / ".penstock" / "demo").mkdir(parents=True)
    DataDir(tmp_path / ".penstock").close()
    (tmp_path / "new").mkdir()
    for _ in range(2):
        DataDir(tmp_path / "new").close()
