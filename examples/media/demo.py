"""The demo: starts Penstock, sends video files through three stages, and runs a flow.

    python -m examples.media.demo [FOLDER] [--out DIR] [--clips N] [--keep]

Without a folder it generates a few clips, and a file that is not a video, to show a failure.
The flow (`examples/nightly`) fails, is recovered, and is approved.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.media.clips import make_clips
from examples.media.consumers import callback_receiver, consume_events
from examples.nightly import run as nightly
from penstock.checks.app import check
from penstock.client import Client, Draft, Task, TaskProgress
from penstock.errors import PenstockError
from penstock.local.deployment import Deployment, Listener, Options
from penstock.logs import quiet_libraries
from penstock.settings import Platform

VIDEO_SUFFIXES = {".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v", ".mpg"}
STAGES = ("probe", "transcode", "thumbnail")
# Seconds of the longest clip that the demo generates.
LONGEST_S = 60.0
# Bars of running tasks.
MAX_BARS = 8

console = Console()


class Watched:
    """The callbacks and events that have arrived, by task."""

    def __init__(self) -> None:
        self.finals: dict[int, str] = {}
        self.called: dict[int, str] = {}
        self.stages: set[tuple[int, int]] = set()
        self.changed = asyncio.Event()

    def on_event(self, event: dict[str, Any]) -> None:
        """Records an event from the topic."""
        task = event.get("task")
        if task is None or task["type"] != "media":
            # An event of a flow, or of its tasks.
            return
        if event["event"] == "task.advanced":
            self.stages.add((task["id"], task["step"]))
        elif task["state"] in ("succeeded", "failed"):
            self.finals[task["id"]] = task["state"]
        self.changed.set()

    def on_callback(self, event: dict[str, Any]) -> None:
        """Records a callback with a valid signature."""
        if event["task"]["state"] in ("succeeded", "failed"):
            self.called[event["task"]["id"]] = event["task"]["state"]
        self.changed.set()


async def demo(folder: Path | None, out: Path, clips: int, *, keep: bool) -> int:
    """Runs the demo; returns the exit status.

    Args:
        folder: of videos; None generates clips.
        out: folder of results.
        clips: number of clips to generate.
        keep: whether the platform goes on until Ctrl-C, for a look at it in the console.
    """
    began = time.monotonic()
    if folder is None:
        console.print(f"generating {clips} clips and a file that is not a video …")
        files = await asyncio.to_thread(make_clips, out / "clips", clips, longest_s=LONGEST_S)
    else:
        files = sorted(path.absolute() for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
        if not files:
            console.print(
                f"[red]there is no video in {folder}[/]; looked for {', '.join(sorted(VIDEO_SUFFIXES))}"
            )
            return 2
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    options = Options(
        data_dir=out / "penstock",
        fresh=True,
        environment={"PENSTOCK_CALLBACK_SECRETS": secret, "NO_COLOR": "1"},
    )
    console.print("starting Kafka, PostgreSQL and all services (the first start fetches Kafka) …")
    fetched = Fetching()
    async with Deployment(options, Listener(on_fetch=fetched)) as deployment:
        console.print(
            f"up after {time.monotonic() - began:.0f} s: gateway {deployment.gateway_url}, log {deployment.log_file}"
        )
        environment = {**os.environ, **deployment.environment}
        with (out / "worker.log").open("w") as log:
            workers = [
                subprocess.Popen(  # noqa: ASYNC220 (starting it takes a millisecond)
                    [sys.executable, "-m", module], env=environment, stderr=log
                )
                for module in ("examples.media.stages", "examples.nightly.worker")
            ]
        try:
            status = await run(deployment, files, out, secret)
            if keep:
                await kept(f"{deployment.gateway_url}/console/")
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                await asyncio.to_thread(worker.wait)
    console.print(f"all in {time.monotonic() - began:.0f} s; everything is stopped.")
    return status


async def kept(console_url: str) -> None:
    """Leaves the platform running until Ctrl-C."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console.print(f"everything goes on: look at it in the console, {console_url}; Ctrl-C stops it")
    await stop.wait()


def videos(folder: Path) -> list[Path]:
    """Returns the video files of a folder, sorted by name."""
    return sorted(path.absolute() for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)


class Fetching:
    """Prints the progress of fetching Kafka as lines, since a progress bar needs a terminal."""

    def __init__(self) -> None:
        self._printed = 0

    def __call__(self, done: int, total: int) -> None:
        """Called by the deployment after each file."""
        if done == total or done - self._printed >= 10:
            self._printed = done
            console.print(f"  fetched {done} of {total} jars")


async def run(deployment: Deployment, files: list[Path], out: Path, secret: str) -> int:
    """Sends the files through the pipeline and shows the results."""
    watched = Watched()
    prefix = deployment.environment["PENSTOCK_PREFIX"]
    listening = asyncio.create_task(consume_events(deployment.kafka, prefix, watched.on_event))
    async with (
        callback_receiver(secret, watched.on_callback) as url,
        Client(deployment.gateway_url) as client,
    ):
        await client.register_type("media", first_stage="probe", max_attempts=3)
        drafts = [
            Draft(
                type="media",
                context={"file": str(file), "out": str(out)},
                idempotency_key=str(file),
                callbacks=[url],
                events="all",
                labels={"file": file.name[:200]},
            )
            for file in files
        ]
        submitted = await client.submit_many(drafts)
        ids = [task.id for task in submitted]
        tasks, _ = await asyncio.gather(client.results(ids), follow(client, watched, ids))
        console.print(
            "the flow nightly: load six files, one of them damaged; report; wait for an approval; publish …"
        )
        flow_succeeded = await nightly.run(
            client, out / "nightly", lambda line: console.print(f"  {line}", soft_wrap=True, highlight=False)
        )
        log = await log_of(client, ids[0])
        report = await check(Platform.load(deployment.environment))
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    show(files, tasks, watched)
    console.print(
        f"{Counter(watched.finals.values())['succeeded']} succeeded, "
        f"{Counter(watched.finals.values())['failed']} failed; "
        f"{len(watched.called)} callbacks with the right signature; "
        f"penstock check: {'clean' if report.clean else report.offenders}"
    )
    console.print(f"results are in {out}; `make demo KEEP=1` leaves the console open", soft_wrap=True)
    console.print(f"the log of task {ids[0]} ({files[0].name}):", highlight=False)
    for line in log:
        console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
    console.print(
        f"read the log of any task: penstock up --detach --data-dir {out / 'penstock'}, then "
        f"penstock logs {ids[0]} --data-dir {out / 'penstock'}; with -f it follows a task that runs",
        soft_wrap=True,
        highlight=False,
    )
    if not all(
        task.state == "succeeded" or Path(task.context["file"]).name == "broken.mkv" for task in tasks
    ):
        return 1
    return 0 if flow_succeeded and report.clean and set(watched.called) == set(ids) else 1


async def follow(client: Client, watched: Watched, ids: list[int]) -> None:
    """Shows progress until every task has ended and every callback has arrived."""
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(f"entered {stage}", total=len(ids)) for stage in STAGES]
        ended = progress.add_task("ended (topic events)", total=len(ids))
        called = progress.add_task("called back (signed)", total=len(ids))
        progress.update(bars[0], completed=len(ids))
        running = RunningTasks(progress)
        showing = asyncio.create_task(running.watch(client, ids))
        while not (set(ids) <= set(watched.finals) and set(ids) <= set(watched.called)):
            await watched.changed.wait()
            watched.changed.clear()
            for number, bar in enumerate(bars[1:], 1):
                progress.update(bar, completed=sum(step == number for _task, step in watched.stages))
            progress.update(ended, completed=len(watched.finals))
            progress.update(called, completed=len(watched.called))
        await showing


class RunningTasks:
    """A bar for each running task whose handler reports its progress.

    Args:
        progress: draws the bars.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[int, TaskID] = {}

    async def watch(self, client: Client, ids: list[int]) -> None:
        """Shows the newest reports until all tasks have ended."""
        async for _counts in client.watch(ids, on_progress=self.show):
            pass

    def show(self, reports: Mapping[int, TaskProgress]) -> None:
        """Shows these reports, and no others."""
        for gone in self._bars.keys() - reports.keys():
            self._progress.remove_task(self._bars.pop(gone))
        for task_id, report in [*reports.items()][:MAX_BARS]:
            if task_id not in self._bars:
                self._bars[task_id] = self._progress.add_task("", total=100)
            self._progress.update(
                self._bars[task_id],
                description=f"  task {task_id}: {report.message}",
                completed=int((report.fraction or 0) * 100),
            )


async def log_of(client: Client, task_id: int) -> list[str]:
    """The lines that the handlers of an ended task have logged, stage after stage."""
    return [
        f"{line['level']:<7} {line['text']}{fields_of(line)}"
        for run in await client.log_runs(task_id)
        async for line in client.log_lines(task_id, run["step"], run["attempt"])
    ]


def fields_of(line: Mapping[str, Any]) -> str:
    """The fields of a line as text."""
    return "".join(f" {name}={value}" for name, value in line.get("fields", {}).items())


def show(files: list[Path], tasks: list[Task], watched: Watched) -> None:
    """Prints the outcome of each file."""
    table = Table("file", "state", "result", "callback")
    for file, task in zip(files, tasks, strict=True):
        if task.state == "succeeded":
            found = task.result["probe"]
            outcome = (
                f"{found['codec']} {found['width']}x{found['height']}, {found['seconds']:g} s → "
                f"{Path(task.result['video']).name}, {Path(task.result['thumbnail']).name}"
            )
        else:
            outcome = str((task.error or {}).get("message", ""))
        table.add_row(file.name, task.state, outcome, "verified" if task.id in watched.called else "missing")
    console.print(table)


def main() -> None:
    """Parses the command line and runs the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help="folder with your videos; without it, clips are generated"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(".penstock/demo"), help="folder for results (%(default)s)"
    )
    parser.add_argument("--clips", type=int, default=6, help="number of clips to generate (%(default)s)")
    parser.add_argument(
        "--keep", action="store_true", help="leave the platform running, with its console, until Ctrl-C"
    )
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    # Their entries about a topic that has just been created read like failures of the demo.
    quiet_libraries()
    try:
        sys.exit(asyncio.run(demo(given.folder, out, given.clips, keep=given.keep)))
    except PenstockError as error:
        console.print(f"[red]the demo could not run:[/] {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
