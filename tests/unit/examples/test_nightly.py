"""The nightly flow, in memory: a damaged file, a recovery, and an approval that may come late."""

from pathlib import Path

import pytest
import yaml
from examples.nightly import run as nightly
from examples.nightly.files import make_files, mend
from examples.nightly.worker import worker

FOLDER = Path(nightly.__file__).parent
DAY = "2026-11-23"


@pytest.fixture
def files(tmp_path):
    make_files(tmp_path)
    return {"day": DAY, "folder": str(tmp_path)}


@pytest.fixture
def pipeline(penstock_pipeline):
    definitions = [yaml.safe_load((FOLDER / name).read_text()) for name in nightly.DEFINITIONS]
    return penstock_pipeline(worker, flows=definitions)


async def test_a_damaged_file_fails_the_flow_and_a_recovery_loads_it_alone(pipeline, files, tmp_path):
    run = await pipeline.run_flow("nightly", files)
    assert (run.nodes["load"], run.nodes["report"]) == ("failed", "blocked")
    failed = [task for task in pipeline.tasks_of(run, "load") if task.state == "failed"]
    assert [task.error["message"].split(":")[0] for task in failed] == ["shop-3.csv is damaged"]
    # A damaged file is not tried again.
    assert failed[0].outcomes == ["fail"]

    mend(tmp_path)
    assert await pipeline.recover_flow(run) == ["load", "report", "approval", "publish"]
    loaded = [Path(task.context["file"]).name for task in pipeline.tasks_of(run, "load")]
    assert loaded.count("shop-3.csv") == 2
    assert set(loaded) == {f"shop-{shop}.csv" for shop in range(1, 7)}

    await pipeline.send_event("report.approved", {"by": "ana"}, key=DAY)
    assert Path(run.output["published"]).read_text() == f"Sales on {DAY}: 630\nApproved by ana\n"


async def test_a_report_that_nobody_approves_in_a_day_fails(pipeline, files, tmp_path):
    mend(tmp_path)
    run = await pipeline.submit_flow("nightly", files)
    await pipeline.send_event("report.approved", {"by": "eve"}, key="another day")
    await pipeline.step(hours=23)
    assert run.nodes["approval"] == "running"
    await pipeline.step(hours=1)
    assert run.node("approval")["timed_out"] == "finish_within"
    assert run.nodes["publish"] == "blocked"
