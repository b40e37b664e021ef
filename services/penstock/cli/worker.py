"""The verb that runs workers of a module."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from penstock.errors import CannotStart, PenstockError
from penstock.process import stop_signals

if TYPE_CHECKING:
    from penstock.worker import Worker

# The attribute of a module that is the worker, unless the argument names another one.
_ATTRIBUTE = "worker"
# Seconds beyond the drain of a worker until its process is killed.
_KILL_GRACE_S = 20.0
# Set for the processes of `--processes` and `--reload`: they run one worker.
_CHILD = "PENSTOCK_WORKER_CHILD"
_METRICS_PORT = "PENSTOCK_WORKER_METRICS_PORT"
# Milliseconds between two looks whether `--reload` is to stop.
_WATCH_MS = 200


@click.command()
@click.argument("target", metavar="MODULE[:NAME]")
@click.option(
    "--processes",
    "-p",
    type=click.IntRange(1, 1_000),
    default=1,
    show_default=True,
    help="The number of processes. A process that ends by itself is started again.",
)
@click.option(
    "--reload", is_flag=True, help="Start the worker again when a Python file changes, for development."
)
def worker(target: str, *, processes: int, reload: bool) -> None:
    """Runs the worker NAME of a Python module until SIGTERM or Ctrl-C; NAME is `worker` by default.

    The module is found from the current directory, as `python -m` finds it, and needs no
    `worker.run()`. Its settings are PENSTOCK_* variables. With several processes, the first serves
    its metrics on PENSTOCK_WORKER_METRICS_PORT, and each further one on the next port. A first
    signal lets running handlers finish; a second one hands the claims back at once.
    """
    if reload and processes > 1:
        raise click.UsageError("--reload runs one process: leave --processes out")
    # Errors of the module are better shown once, before any process is started.
    found = load(target)
    if os.environ.get(_CHILD) or (processes == 1 and not reload):
        found.run()
    elif reload:
        _run_reloading(target, found.settings.drain_timeout_s)
    else:
        asyncio.run(_run_many(target, _environments(found, processes), found.settings.drain_timeout_s))


def load(target: str) -> Worker:
    """The worker that `module:name` names.

    Raises:
        CannotStart: there is no such module or attribute, the module raises, or it has no worker.
    """
    from penstock.worker import Worker  # noqa: PLC0415 (with its dependencies)
    from penstock.worker.app import importing  # noqa: PLC0415 (as above)

    module_name, _, name = target.partition(":")
    name = name or _ATTRIBUTE
    if module_name.endswith(".py") or "/" in module_name:
        raise CannotStart(
            f"{module_name} is a file: give its module, such as {Path(module_name).stem}:{name}, in its directory"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    token = importing.set(True)
    try:
        module = importlib.import_module(module_name)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        # An exit has its own status, which may be 0: no supervisor would report it.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name + ".").startswith(missing + "."):
            raise CannotStart(
                f"there is no module {missing!r} in {here} or among the installed packages"
            ) from error
        raise _import_error(module_name, error) from error
    finally:
        importing.reset(token)
    found = getattr(module, name, None)
    if not isinstance(found, Worker):
        others = sorted(key for key, value in vars(module).items() if isinstance(value, Worker))
        hint = f"it has {', '.join(others)}" if others else "it has no Worker"
        raise CannotStart(f"{module_name}:{name} is no penstock.worker.Worker: {hint}")
    return found


def _import_error(module_name: str, error: Exception | SystemExit) -> CannotStart:
    """An error of the module, with its lines and without those of Penstock."""
    text = "".join(traceback.format_exception_only(error)).strip()
    found = CannotStart(f"the module {module_name} cannot be imported: {text}")
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename != __file__ and "importlib" not in frame.filename:
            found.add_note(f"{frame.filename}:{frame.lineno}, in {frame.name}")
    return found


def _command(target: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "penstock", "worker", target)


def _environments(found: Worker, processes: int) -> list[dict[str, str]]:
    """The variables of each process: their metrics need a port each.

    Raises:
        CannotStart: the module gives all processes the same port.
    """
    port = found.settings.worker_metrics_port
    if port and os.environ.get(_METRICS_PORT) != str(port):
        raise CannotStart(
            f"the module gives each process the port {port} for metrics: set {_METRICS_PORT} instead, "
            "from which the processes count"
        )
    return [
        {_CHILD: "1", **({_METRICS_PORT: str(port + number)} if port else {})} for number in range(processes)
    ]


async def _run_many(target: str, environments: list[dict[str, str]], drain_s: float) -> None:
    from penstock.local.output import MergedLog, wants_colour  # noqa: PLC0415 (only for several processes)
    from penstock.local.supervisor import Program, Supervisor  # noqa: PLC0415 (only for several processes)

    stopping = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="penstock-workers-") as run_dir:
        loop = asyncio.get_running_loop()
        log = MergedLog(
            sys.stdout,
            colour=wants_colour(sys.stdout),
            on_lost=lambda: loop.call_soon_threadsafe(stopping.set),
        )
        supervisor = Supervisor(log, run_dir=Path(run_dir))
        with stop_signals(stopping.set, supervisor.kill_all, signal.SIGINT, signal.SIGTERM):
            try:
                for number, environment in enumerate(environments, 1):
                    supervisor.start(
                        Program(
                            name=f"worker-{number}",
                            argv=_command(target),
                            environment=environment,
                            grace_s=drain_s + _KILL_GRACE_S,
                        )
                    )
                await stopping.wait()
            finally:
                # In a thread, so that a second signal is received meanwhile.
                await asyncio.to_thread(supervisor.close)


def _run_reloading(target: str, drain_s: float) -> None:
    try:
        import watchfiles  # noqa: PLC0415 (optional package)
    except ModuleNotFoundError as error:
        raise CannotStart(
            "--reload needs watchfiles, which is not installed: pip install watchfiles"
        ) from error
    stopping = threading.Event()
    changes = watchfiles.watch(
        ".",
        watch_filter=watchfiles.PythonFilter(),
        raise_interrupt=False,
        stop_event=stopping,
        yield_on_timeout=True,
        rust_timeout=_WATCH_MS,
    )
    # The watch begins here. A change that follows the start of the worker is never missed.
    next(changes)
    child = _start_child(target)

    def stop(number: int, _frame: FrameType | None) -> None:
        # A second signal hands the claims back, as without --reload.
        child.send_signal(number)
        stopping.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for changed in changes:
            if stopping.is_set():
                break
            if changed:
                name = min(Path(path).name for _kind, path in changed)
                click.echo(f"penstock: {name} changed: the worker starts again", err=True)
                child.send_signal(signal.SIGINT)
                _wait_ended(child, drain_s)
                if not stopping.is_set():
                    child = _start_child(target)
                if stopping.is_set():
                    # The signal may have reached the ended worker only.
                    child.send_signal(signal.SIGTERM)
    finally:
        if not stopping.is_set():
            child.send_signal(signal.SIGTERM)
        _wait_ended(child, drain_s)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_child(target: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(_command(target), env={**os.environ, _CHILD: "1"})  # noqa: S603 (this program itself)


def _wait_ended(child: subprocess.Popen[bytes], drain_s: float) -> None:
    """Waits until a worker that was signalled has drained, and kills it after its time."""
    try:
        child.wait(drain_s + _KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
