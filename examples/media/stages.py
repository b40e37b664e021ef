"""The three stages, as plain functions of a context and as handlers of a worker.

    python -m examples.media.stages

runs a worker; it finds Kafka and the object store by PENSTOCK_KAFKA and PENSTOCK_OBJECTS, or by a
`penstock up` that runs here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from penstock.worker import Done, Fail, Next, Outcome, Task, Worker

WIDTH = 320


class NotAVideo(Exception):  # noqa: N818 (says what happened)
    """The file cannot be decoded, and a retry cannot help."""


def probe(source: Path) -> dict[str, Any]:
    """Probes a file: duration in seconds, pixels, frames per second, codec.

    Raises:
        NotAVideo: nothing that FFmpeg can show.
    """
    try:
        with av.open(str(source)) as container:
            stream = container.streams.video[0]
            frame = next(container.decode(stream))
            return {
                "seconds": round((container.duration or 0) / av.time_base, 2),
                "width": frame.width,
                "height": frame.height,
                "fps": round(float(stream.average_rate or 0), 2),
                "codec": stream.codec_context.name,
                "bytes": source.stat().st_size,
            }
    except (av.FFmpegError, IndexError, StopIteration) as error:
        why = error.strerror if isinstance(error, av.FFmpegError) else "it has no frames"
        raise NotAVideo(f"{source.name} is not a video: {why}") from error


def transcode(source: Path, target: Path, on_frame: Callable[[int], object] = lambda _frames: None) -> int:
    """Writes an H.264 copy 320 pixels wide and returns its number of frames; idempotent.

    Calls `on_frame` with the number of frames after each.
    """
    # Renamed only when complete, so that a killed worker leaves no partial file under this name.
    unfinished = target.with_suffix(".unfinished.mp4")
    frames = 0
    with av.open(str(source)) as incoming, av.open(str(unfinished), "w") as outgoing:
        stream = incoming.streams.video[0]
        height = max(2, round(WIDTH * stream.height / stream.width / 2) * 2)
        rate = stream.average_rate or Fraction(25)
        encoder = outgoing.add_stream("libx264", rate=rate, options={"preset": "veryfast"})
        encoder.width, encoder.height, encoder.pix_fmt = WIDTH, height, "yuv420p"
        for frame in incoming.decode(stream):
            scaled = frame.reformat(WIDTH, height, "yuv420p")
            # New timestamps, because those of the source may have gaps or be missing.
            scaled.pts, scaled.time_base = frames, 1 / rate
            outgoing.mux(encoder.encode(scaled))
            frames += 1
            on_frame(frames)
        outgoing.mux(encoder.encode(None))
    unfinished.replace(target)
    return frames


def thumbnail(source: Path, target: Path) -> None:
    """Writes the frame in the middle as a JPEG."""
    with av.open(str(source)) as container:
        stream = container.streams.video[0]
        middle = stream.frames // 2
        image = None
        for number, frame in enumerate(container.decode(stream)):
            image = frame
            if number >= middle:
                break
    if image is None:
        raise NotAVideo(f"{source.name} has no frames")
    unfinished = target.with_suffix(".unfinished.jpg")
    image.to_image().save(unfinished, quality=85)
    unfinished.replace(target)


worker = Worker()


@dataclass
class Video:
    """The context of the first stage: the file, and the folder of the results."""

    file: Path
    out: Path


@dataclass
class Probed(Video):
    """A video that was probed."""

    probe: dict[str, Any]


@dataclass
class Transcoded(Probed):
    """A video with its copy."""

    video: Path
    frames: int


# Decoding is CPU-bound, so the handlers are synchronous: they run on threads and cannot delay
# heartbeats.
@worker.stage("media.probe", timeout_s=60)
def probe_stage(task: Task[Video]) -> Outcome:
    video = task.context
    try:
        found = probe(video.file)
    except NotAVideo as error:
        return Fail(str(error), permanent=True)
    task.log.info("probed", file=video.file.name, **found)
    return Next("transcode", Probed(video.file, video.out, found))


@worker.stage("media.transcode", timeout_s=600, max_attempts=3)
def transcode_stage(task: Task[Probed]) -> Outcome:
    video = task.context
    target = video.out / f"{video.file.stem}.mp4"
    # Many containers name only the duration, so the number of frames is an estimate.
    expected = max(1, round(video.probe["seconds"] * video.probe["fps"]))

    def report(frames: int) -> None:
        task.progress(min(1.0, frames / expected), f"frame {frames:,} of {expected:,}")

    # Handlers may also print, and use `logging`: all of it is in the task's log.
    print(f"transcoding about {expected:,} frames to {WIDTH} pixels")
    frames = transcode(video.file, target, report)
    task.log.info("wrote the video", file=target.name, frames=frames, bytes=target.stat().st_size)
    return Next("thumbnail", Transcoded(video.file, video.out, video.probe, target, frames))


@worker.stage("media.thumbnail", timeout_s=60)
def thumbnail_stage(task: Task[Transcoded]) -> Outcome:
    video = task.context
    target = video.video.with_suffix(".jpg")
    thumbnail(video.video, target)
    task.log.info("wrote the thumbnail", file=target.name, bytes=target.stat().st_size)
    return Done(
        {
            "file": video.file,
            "probe": video.probe,
            "video": video.video,
            "frames": video.frames,
            "thumbnail": target,
            "worker": os.getpid(),
        }
    )


if __name__ == "__main__":
    worker.run()
