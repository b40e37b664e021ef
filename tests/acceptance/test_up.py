"""`penstock up`, as a process that is started, signalled and killed."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from functools import partial

import asyncpg
import psutil
import pytest

from penstock.client import Client
from penstock.discovery import running
from penstock.errors import CannotStart, KafkaUnavailable, PostgresUnavailable, SettingsError
from penstock.kafka.client.connection import admin_client
from penstock.local.deployment import SERVICES, Deployment, Listener, Options, Service
from penstock.local.ports import choose_port
from penstock.process import exit_status
from penstock.settings import Kafka
from tests.support.memory_folder import make_folder
from tests.support.waiting import wait_until

# Simulates a service: prints its settings, creates its ready file, and ends on SIGTERM.
FAKE_SERVICE = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: (print("fake-stopped", flush=True), os._exit(0)))
print("settings", os.environ["PENSTOCK_KAFKA"], os.environ["PENSTOCK_PREFIX"], flush=True)
pathlib.Path(os.environ["PENSTOCK_READY_FILE"]).touch()
while True: time.sleep(60)
"""
FAKE_SERVICES = {
    name: Service(argv=(sys.executable, "-c", FAKE_SERVICE), order=order)
    for name, order in (
        ("gateway", 0),
        ("task-sync", 0),
        ("heartbeats", 1),
        ("stages", 2),
        ("flows", 3),
        ("callbacks", 4),
    )
}


@pytest.fixture
def data_dir():
    """A folder with a short path, since the length of socket paths is limited."""
    path = make_folder()
    yield path / "data"
    shutil.rmtree(path)


@pytest.fixture
def options_of(data_dir, kafka_servers, prefix, empty_database):
    """Makes the options of a deployment on the servers of all tests."""
    return partial(Options, data_dir=data_dir, kafka=kafka_servers, postgres=empty_database, prefix=prefix)


@pytest.fixture
def start_up(data_dir):
    """Starts `penstock up` with fake services in a separate process."""
    started = []

    def start(**options) -> subprocess.Popen[str]:
        script = textwrap.dedent(f"""
            import asyncio, sys
            from pathlib import Path
            from penstock.local.deployment import Options, Service
            from penstock.local.up import up
            fakes = {{name: Service(argv=argv, order=order) for name, argv, order in
                {[(name, fake.argv, fake.order) for name, fake in FAKE_SERVICES.items()]!r}}}
            options = Options(data_dir=Path({str(data_dir)!r}), services=fakes, **{options!r})
            sys.exit(asyncio.run(up(options)))
        """)
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


async def test_up_prints_its_addresses_and_stops_services_in_order(start_up, data_dir):
    """On SIGTERM, `up` stops the services that accept work first, ends with status 0 and leaves
    no process.

    Its summary has the addresses. It reports a taken port and uses another one. A second `up` on
    the same directory is refused.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start_up(gateway_port=port)
        addresses = await wait_until(lambda: running(data_dir))
    servers = psutil.Process(process.pid).children()

    second = start_up()
    message, _ = await asyncio.to_thread(second.communicate)
    assert second.returncode == 6
    assert f"another `penstock up` (process {process.pid}) runs in {data_dir}" in message

    process.send_signal(signal.SIGTERM)
    output, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, output
    assert f"port {port} is taken: the gateway listens on " in output
    hint = f"export PENSTOCK_DATA_DIR={data_dir}"
    for expected_text in (
        addresses.gateway,
        addresses.kafka,
        addresses.objects,
        hint,
        "Ctrl-C stops everything",
    ):
        assert expected_text in output
    assert f"stages       settings {addresses.kafka} penstock." in output
    stopped = [line.split()[0] for line in output.splitlines() if line.endswith(" fake-stopped")]
    assert sorted(stopped[:2]) == ["gateway", "task-sync"]
    assert stopped[2:] == ["heartbeats", "stages", "flows", "callbacks"]
    assert "\x1b[" not in output
    assert running(data_dir) is None
    assert not (data_dir / "state.json").exists()
    assert not [server for server in servers if server.is_running()]


async def test_a_killed_up_leaves_no_process_and_the_next_one_starts(start_up, data_dir):
    """O1: after kill -9 of `up`, services and servers end by themselves. The next run needs no
    repair, and has the rows and topics of the first one."""
    process = start_up()
    before = await wait_until(lambda: running(data_dir))
    await _execute(before.postgres, "CREATE TABLE public.kept ()")
    assert "penstock.stage-results" in await _topics(before.kafka)
    children = psutil.Process(process.pid).children()
    assert len(children) == len(FAKE_SERVICES) + 3  # Kafka, PostgreSQL and the reaper
    process.kill()
    await asyncio.to_thread(process.communicate)
    assert running(data_dir) is None
    await wait_until(lambda: not any(_runs(child) for child in children))

    second = start_up()
    addresses = await wait_until(lambda: running(data_dir))
    assert addresses.pid == second.pid
    await _execute(addresses.postgres, "SELECT FROM public.kept")
    assert "penstock.stage-results" in await _topics(addresses.kafka)
    second.send_signal(signal.SIGINT)
    await asyncio.to_thread(second.communicate)
    assert second.returncode == 0


async def test_a_fresh_deployment_has_no_data_of_an_earlier_one(data_dir, monkeypatch):
    """`fresh` drops the rows of an earlier run, which survive otherwise (see the test above).
    Topics and tables exist before any service starts. A killed service is started again."""
    options = {
        "data_dir": data_dir,
        "services": FAKE_SERVICES,
        "gateway_port": 0,
        "kafka_port": 0,
        "postgres_port": 0,
    }
    async with Deployment(Options(**options)) as deployment:
        await _execute(deployment.postgres, "CREATE TABLE public.kept ()")
        assert "penstock.stage-results" in await _topics(deployment.kafka)
        assert set(deployment.processes) == {*FAKE_SERVICES, "kafka", "postgres"}
        # C7: a trial deployment has its callback targets on this machine.
        assert deployment.environment["PENSTOCK_CALLBACK_ALLOW"] == "127.0.0.0/8,::1/128"
        killed_pid = deployment.kill("stages")
        await wait_until(lambda: deployment.exits("stages") == 1)
        await deployment.wait_ready(["stages"])
        assert deployment.processes["stages"] != killed_pid
    monkeypatch.setenv("PENSTOCK_CALLBACK_ALLOW", "")
    async with Deployment(Options(**options, fresh=True)) as deployment:
        assert deployment.environment["PENSTOCK_CALLBACK_ALLOW"] == ""
        with pytest.raises(asyncpg.UndefinedTableError):
            await _execute(deployment.postgres, "SELECT FROM public.kept")


async def test_existing_servers_are_used(options_of, data_dir, kafka_servers, prefix, empty_database):
    """With `kafka` and `postgres` given, the deployment starts only the services, each with its
    number of replicas."""
    options = options_of(
        services=FAKE_SERVICES,
        replicas={"gateway": 1, "stages": 2},
    )
    async with Deployment(options) as deployment:
        assert set(deployment.processes) == {"gateway", "stages", "stages-2"}
        assert deployment.environment["PENSTOCK_POSTGRES"] == empty_database
        # C7: the servers may be in production, and this gateway does not authenticate requests.
        assert deployment.environment["PENSTOCK_CALLBACK_ALLOW"] == ""
        assert f"{prefix}events" in await _topics(kafka_servers)
        state = json.loads((data_dir / "state.json").read_text())
        assert state["gateway"] == deployment.gateway_url
        assert (data_dir / "state.json").stat().st_mode & 0o077 == 0


async def test_a_metrics_port_that_is_taken_gives_way_to_another(options_of):
    """O4: each process has a port of its own, counted from the setting, and another where that is
    taken. The deployment says where each listens."""
    steps: list[str] = []
    with socket.create_server(("127.0.0.1", choose_port())) as taken:
        usual = taken.getsockname()[1]
        options = options_of(
            services=FAKE_SERVICES,
            replicas={"gateway": 1, "stages": 1},
            environment={"PENSTOCK_METRICS_PORT": str(usual)},
            # The next usual port after the one that is taken.
            gateway_port=usual + 1,
        )
        async with Deployment(options, Listener(on_step=steps.append)) as deployment:
            ports = deployment.metrics_ports
            told = {
                name: int(psutil.Process(pid).environ()["PENSTOCK_METRICS_PORT"])
                for name, pid in deployment.processes.items()
            }
    assert told == ports
    assert len({usual, int(deployment.gateway_url.rpartition(":")[2]), *ports.values()}) == 4
    assert f"port {usual} is taken: gateway has its metrics on {ports['gateway']}" in steps


async def test_a_service_that_cannot_start_ends_the_start(options_of, data_dir):
    """A service that keeps failing ends the start with its last log lines, and no process
    remains."""
    broken = {"stages": Service(argv=(sys.executable, "-c", "raise SystemExit('no such table')"), order=0)}
    options = options_of(services=broken)
    deployment = Deployment(options)
    with pytest.raises(CannotStart, match=r"stages does not start; its last log lines:\nno such table"):
        async with deployment:
            pass
    assert deployment.processes == {}
    assert running(data_dir) is None


async def test_a_service_that_refuses_its_settings_is_not_started_again(options_of):
    """O8: `up` ends at the gateway's first refusal, with its message and the status of wrong
    settings."""
    gateway = {"gateway": SERVICES["gateway"]}
    options = options_of(
        services=gateway,
        environment={"PENSTOCK_GATEWAY_HOST": "0.0.0.0"},
    )
    deployment = Deployment(options)
    with pytest.raises(CannotStart, match=r"^gateway cannot start:\n.*PENSTOCK_GATEWAY_AUTH=keys") as refused:
        async with deployment:
            pass
    assert exit_status(refused.value) == 6
    assert deployment.processes == {}
    assert "restarting it" not in str(refused.value)
    refusals = [
        line for line in deployment.log_file.read_text().splitlines() if "PENSTOCK_GATEWAY_AUTH" in line
    ]
    assert len(refusals) == 1


async def test_a_refusal_does_not_wait_for_other_services(options_of):
    """O8: a refusal ends the start at once, also while a service that was started before is not
    ready."""
    argv = (sys.executable, "-c")
    services = {
        "stages": Service(argv=(*argv, "import signal; signal.pause()"), order=0),
        "callbacks": Service(argv=(*argv, "print('no such secret'); raise SystemExit(6)"), order=0),
    }
    options = options_of(
        services=services,
        # If services were awaited one by one, the error would name `stages` after this time.
        start_timeout_s=20,
    )
    with pytest.raises(CannotStart, match=r"^callbacks cannot start:\nno such secret"):
        async with Deployment(options):
            pass


async def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    """A directory that cannot be written ends the start, with a message that names it and the
    option."""
    (tmp_path / "file").touch()
    with pytest.raises(CannotStart, match=r"file/data cannot be written .* choose another --data-dir"):
        async with Deployment(Options(data_dir=tmp_path / "file" / "data")):
            pass


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"replicas": {"stagse": 1}}, ["stagse", "services"]),
        ({"replicas": {"gateway": 2}}, ["replicas=gateway:2", "gateway_port"]),
        ({"fresh": True, "kafka": "k:1", "postgres": "postgresql://p"}, ["fresh", "kafka", "postgres"]),
    ],
)
def test_contradicting_options_are_refused(options, names):
    """Contradicting options are refused before any start, with the names of both fields."""
    with pytest.raises(SettingsError) as refused:
        Deployment(Options(**options))
    for name in names:
        assert name in str(refused.value)


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def _topics(servers: str) -> list[str]:
    async with admin_client(Kafka(kafka=servers)) as client:
        return await client.list_topics()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
@pytest.mark.parametrize("name", ["Größe 日本", "a,b 'c' \"d\" #%20 $HOME \\ " + "long " * 20])
async def test_a_deployment_starts_twice_in_any_directory(data_dir, name, monkeypatch):
    """O1: the directory's name has letters beyond ASCII, commas, quotes and more bytes than a
    socket's path may have. What the first run stored is there in the second, and nothing is written
    beside the directory."""
    monkeypatch.setenv("LC_ALL", "C")
    place = data_dir.parent / name
    place.mkdir()
    data_dir.parent.chmod(0o755)
    monkeypatch.chdir(place)
    options = Options(
        data_dir=place / ".penstock", gateway_port=0, kafka_port=0, postgres_port=0, replicas={"gateway": 1}
    )
    large = "x" * 5000
    async with Deployment(options) as deployment, Client(deployment.gateway_url) as client:
        await client.register_type("t")
        task_id = (await client.submit("t", large)).id
    async with Deployment(options) as deployment, Client(deployment.gateway_url) as client:
        assert (await client.get(task_id)).context == large
        found = running(options.data_dir)
        assert found is not None
        assert found.gateway == deployment.gateway_url
        assert (options.data_dir / "kafka" / "data" / "meta.properties").exists()
    assert [path.name for path in data_dir.parent.iterdir()] == [name]
    assert [path.name for path in place.iterdir()] == [".penstock"]


@pytest.mark.parametrize(
    ("option", "value", "error", "reason"),
    [
        (
            "kafka",
            "127.0.0.1:1",
            KafkaUnavailable,
            "no Kafka broker answers at 127.0.0.1:1 after 15 s: start",
        ),
        ("postgres", "postgresql://127.0.0.1:1/x", PostgresUnavailable, "Connect call failed"),
    ],
)
async def test_an_existing_server_that_does_not_answer_is_named_before_others_start(
    data_dir, option, value, error, reason
):
    """O8: `up` asks the servers of its options first, and the error names the option to correct."""
    steps = []
    with pytest.raises(error) as refused:
        async with Deployment(Options(data_dir=data_dir, **{option: value}), Listener(on_step=steps.append)):
            pass
    assert reason in str(refused.value)
    assert str(refused.value).endswith(f"or correct --{option}")
    assert "AddressFamily" not in str(refused.value)
    assert steps == []


async def test_a_deployment_in_the_background(data_dir):
    """O8: `up --detach` returns when all services serve, `status` shows them, and `down` stops
    them. The next start has the same ports."""

    async def penstock(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "penstock", *words, "--data-dir", str(data_dir)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert (await penstock("status"))[0] == 1
    code, output = await penstock("down")
    assert (code, "no deployment runs" in output) == (0, True)

    async def start() -> tuple[str, str]:
        """The addresses of a deployment that was started in the background."""
        code, output = await penstock("up", "--detach", "--only", "gateway")
        assert code == 0, output
        assert "`penstock down` stops it" in output
        addresses = running(data_dir)
        assert addresses is not None
        return addresses.gateway, addresses.kafka

    addresses = await start()
    code, output = await penstock("status", "--json")
    assert (code, json.loads(output)["serving"]) == (0, {"gateway": True})
    code, output = await penstock("logs", "--grep", "process_ready", "--tail", "500")
    assert (code, "gateway" in output) == (0, True)
    code, again = await penstock("up", "-d")
    assert code == 6
    assert "another `penstock up`" in again
    assert await penstock("down") == (0, "stopped\n")
    assert running(data_dir) is None
    assert await start() == addresses
    assert (await penstock("down"))[0] == 0
