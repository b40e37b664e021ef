"""`penstock up`: runs a deployment in a terminal, with progress and a merged log, until Ctrl-C."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from penstock.discovery import DATA_DIR_VARIABLE, DEFAULT_DATA_DIR
from penstock.errors import PenstockError
from penstock.local.background import leave_terminal
from penstock.local.deployment import Deployment, Listener, Options
from penstock.local.output import MergedLog, wants_colour
from penstock.process import EXIT_FAILED, exit_status, stop_signals


async def up(
    options: Options,
    console: Console | None = None,
    *,
    on_ready: Callable[[Deployment], None] | None = None,
    in_background: bool = False,
) -> int:
    """Starts a deployment, prints its addresses, and runs until SIGINT, SIGTERM or SIGHUP.

    It also stops when its output ends, as in `penstock up | head`. A second signal, at least a
    second later, kills the programs that have not stopped yet.

    Args:
        options: what to start.
        console: output for progress, summary and log; standard output by default.
        on_ready: called once all services serve.
        in_background: end all output once all services serve.

    Returns:
        The exit status: 0 after an orderly stop, 1 when the output has ended, else
            `process.exit_status` of an error that the console shows.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    with _progress(console) as on_fetch:
        log = MergedLog(
            console.file,
            colour=wants_colour(console.file),
            on_lost=lambda: None if in_background else loop.call_soon_threadsafe(stopping.set),
        )

        def on_step(text: str) -> None:
            log("penstock", text)

        deployment = Deployment(options, Listener(on_step=on_step, on_fetch=on_fetch, on_line=log))
        with stop_signals(stopping.set, deployment.kill_all, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            running = asyncio.create_task(
                _run(deployment, console, stopping, on_ready, in_background=in_background)
            )
            stop = asyncio.create_task(stopping.wait())
            await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not running.done():
                on_step("stopping (press Ctrl-C again to kill)")
                running.cancel()
            try:
                await running
            except asyncio.CancelledError:
                on_step("stopped")
            except PenstockError as error:
                console.print(f"penstock up: {error}", style="bold red", markup=False)
                return exit_status(error)
    return EXIT_FAILED if log.lost and not in_background else 0


async def _run(
    deployment: Deployment,
    console: Console,
    stopping: asyncio.Event,
    on_ready: Callable[[Deployment], None] | None,
    *,
    in_background: bool,
) -> None:
    async with deployment:
        how_to_stop = "`penstock down` stops it." if in_background else "Ctrl-C stops everything."
        console.print(_summary(deployment, how_to_stop), markup=False)
        if on_ready:
            on_ready(deployment)
        if in_background:
            leave_terminal()
        await stopping.wait()


def _summary(deployment: Deployment, how_to_stop: str) -> str:
    from penstock.gateway.console import console_folder  # noqa: PLC0415 (optional dependency)
    from penstock.postgres.connection import without_password  # noqa: PLC0415 (optional dependency)

    postgres = deployment.embedded_postgres
    address = without_password(postgres.tcp_dsn() if postgres else deployment.postgres)
    if postgres:
        address += f" (password in {postgres.password_file})"
    built = console_folder() is not None
    rows = {
        "Console": f"{deployment.gateway_url}/console/" if built else "not built: run `make console`",
        "Gateway": deployment.gateway_url,
        "Kafka": deployment.kafka,
        "PostgreSQL": address,
        "Objects": deployment.addresses.objects,
        "Data": str(deployment.data_dir),
        "Log": str(deployment.log_file),
        "Callbacks": f"signed with the secret in {deployment.callback_secret_file}",
    }
    lines = [f"  {name:<11} {value}" for name, value in rows.items()]
    export = f"export {DATA_DIR_VARIABLE}={shlex.quote(str(deployment.data_dir))}"
    # Workers and verbs without addresses look in the current directory.
    if deployment.data_dir == DEFAULT_DATA_DIR.absolute():
        hint = f"Workers and the command line find it when started in this directory; elsewhere: {export}"
    else:
        hint = f"Workers and the command line find it after: {export}"
    return "\n".join(["", f"Penstock is up. {how_to_stop}", "", *lines, "", f"  {hint}", ""])


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar while jars are fetched; shows nothing when all are in the cache."""
    columns = (TextColumn("fetching Kafka"), BarColumn(), MofNCompleteColumn(), TextColumn("jars"))
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=None, visible=False)

    def on_fetch(done: int, total: int) -> None:
        if done == 1:
            bar.start()
        bar.update(task, completed=done, total=total, visible=True)
        if done == total:
            bar.stop()

    try:
        yield on_fetch
    finally:
        # Stopping a bar that was never shown would print an empty line.
        if bar.live.is_started:
            bar.stop()
