"""The demo's stages, without any server: as plain functions, and as a pipeline in memory."""

import threading
from datetime import UTC, datetime

import av
import pytest
from examples.media import stages
from examples.media.clips import make_clips
from examples.media.demo import RunningTasks
from examples.media.stages import probe, thumbnail, transcode, worker
from rich.progress import Progress

from penstock.client import TaskProgress


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return make_clips(tmp_path_factory.mktemp("clips"), 1, seconds=0.5)


def test_probe_tells_what_is_in_a_file(clips):
    """Duration, pixels, frames per second and codec."""
    found = probe(clips[0])
    assert (found["width"], found["height"], found["fps"], found["codec"]) == (320, 240, 24.0, "mpeg4")
    assert found["seconds"] == pytest.approx(0.5, abs=0.1)


def test_transcode_and_thumbnail_can_be_run_again(clips, tmp_path):
    """A stage may run twice; its files are whole at any time, and the second run writes the
    same."""
    video, image = tmp_path / "a.mp4", tmp_path / "a.jpg"
    for _ in range(2):
        assert transcode(clips[0], video) == 12
        thumbnail(video, image)
    with av.open(str(video)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        assert container.streams.video[0].width == 320
    assert image.read_bytes()[:2] == b"\xff\xd8"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jpg", "a.mp4"]


@pytest.fixture
def pipeline(penstock_pipeline):
    return penstock_pipeline(worker)


async def test_a_clip_passes_all_stages(pipeline, clips, tmp_path):
    """Each stage has the context that it names, and reports each frame."""
    run = await pipeline.run("media", {"file": str(clips[0]), "out": str(tmp_path)})
    assert run.stages == ["probe", "transcode", "thumbnail"]
    assert run.result["frames"] == 12
    assert (tmp_path / run.result["thumbnail"]).exists()
    assert [report.message for report in run.progress][-1] == "frame 12 of 12"
    assert [report.fraction for report in run.progress][-1] == 1.0


async def test_what_is_no_video_fails_at_once(pipeline, clips, tmp_path):
    """A retry cannot help, so there is none; the failure has a reason that a person can use."""
    run = await pipeline.run("media", {"file": str(clips[-1]), "out": str(tmp_path)})
    assert (run.state, run.outcomes) == ("failed", ["fail"])
    assert "broken.mkv is not a video: Invalid data" in run.error["message"]


async def test_a_worker_that_dies_while_it_transcodes_costs_an_attempt(
    pipeline, clips, tmp_path, monkeypatch
):
    """The next worker writes the whole file again."""
    real, died = stages.transcode, threading.Event()

    def dying(source, target, on_frame):
        monkeypatch.setattr(stages, "transcode", real)
        died.wait()
        return 0

    monkeypatch.setattr(stages, "transcode", dying)
    run = await pipeline.submit("media", {"file": str(clips[0]), "out": str(tmp_path)})
    await pipeline.lose_worker()
    await pipeline.until(run, lambda run: run.ended)
    died.set()
    assert run.outcomes == ["next", "expired", "next", "done"]
    assert run.result["frames"] == 12


def test_running_tasks_have_bars():
    """H5: the bar of a task has its last report, and vanishes with it."""
    progress = Progress(disable=True)
    running = RunningTasks(progress)

    def bars():
        return [(bar.description.strip(), bar.completed) for bar in progress.tasks]

    def report(fraction, message):
        return TaskProgress(fraction, message, datetime(2026, 11, 24, tzinfo=UTC))

    running.show({7: report(0.25, "frame 1 of 4"), 8: report(None, "opening")})
    assert bars() == [("task 7: frame 1 of 4", 25), ("task 8: opening", 0)]
    running.show({7: report(0.5, "frame 2 of 4")})
    assert bars() == [("task 7: frame 2 of 4", 50)]
    running.show({})
    assert bars() == []
