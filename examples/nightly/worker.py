"""The worker of the nightly flow: one stage for each type of task.

It finds Kafka and the object store by PENSTOCK_KAFKA and PENSTOCK_OBJECTS, or by a `penstock up`
that runs in this directory.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from penstock.worker import Done, Fail, Outcome, Task, Worker


def list_files(task: Task) -> Done:
    """Lists the files that wait in the folder."""
    return Done({"files": sorted(str(path) for path in Path(task.context["folder"]).glob("*.csv"))})


def load_file(task: Task) -> Outcome:
    """Adds up the sales of one shop; a damaged file fails at once, because a retry cannot help."""
    path = Path(task.context["file"])
    try:
        with path.open(newline="") as lines:
            return Done({"shop": path.stem, "sales": sum(int(row["sales"]) for row in csv.DictReader(lines))})
    except ValueError as error:
        return Fail(f"{path.name} is damaged: {error}", permanent=True)


def add_up(task: Task) -> Done:
    """Adds up the sales of all shops."""
    return Done({"total": sum(shop["sales"] for shop in task.context["sales"])})


def write_report(task: Task) -> Done:
    """Writes the report; the second time it writes the same file."""
    given: dict[str, Any] = task.context
    path = Path(given["folder"]) / f"report-{given['day']}.txt"
    path.write_text(f"Sales on {given['day']}: {given['total']}\n")
    return Done({"report": str(path)})


def publish_report(task: Task) -> Done:
    """Appends who approved the report, and says where it is."""
    given: dict[str, Any] = task.context
    path = Path(given["report"])
    published = path.with_suffix(".published.txt")
    published.write_text(f"{path.read_text()}Approved by {given['by']}\n")
    return Done({"published": str(published)})


STAGES = {
    "list-files": list_files,
    "load-file": load_file,
    "add-up": add_up,
    "write-report": write_report,
    "publish-report": publish_report,
}

worker = Worker()
for type_name, handler in STAGES.items():
    worker.stage(f"{type_name}.run")(handler)

if __name__ == "__main__":
    worker.run()
