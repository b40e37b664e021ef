"""The three stages, as plain functions of a context and as handlers of a worker.

    python -m examples.media.stages

runs a worker; it finds Kafka and the object store by PENSTOCK_KAFKA and PENSTOCK_OBJECTS, or by a
`penstock up` that runs here.
"""

from __future__ import annotations

import os
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


def transcode(source: Path, target: Path) -> int:
    """Writes an H.264 copy 320 pixels wide and returns its number of frames; idempotent."""
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


# Decoding is CPU-bound, so the handlers are synchronous: they run on threads and cannot delay
# heartbeats.
@worker.stage("media.probe", timeout_s=60)
def probe_stage(task: Task) -> Outcome:
    source, out = Path(task.context["file"]), Path(task.context["out"])
    try:
        found = probe(source)
    except NotAVideo as error:
        return Fail(str(error), permanent=True)
    return Next("transcode", {"file": str(source), "out": str(out), "probe": found})


@worker.stage("media.transcode", timeout_s=600, max_attempts=3)
def transcode_stage(task: Task) -> Outcome:
    source, out = Path(task.context["file"]), Path(task.context["out"])
    target = out / f"{source.stem}.mp4"
    frames = transcode(source, target)
    return Next("thumbnail", {**task.context, "video": str(target), "frames": frames})


@worker.stage("media.thumbnail", timeout_s=60)
def thumbnail_stage(task: Task) -> Outcome:
    video = Path(task.context["video"])
    target = video.with_suffix(".jpg")
    thumbnail(video, target)
    result = {key: value for key, value in task.context.items() if key != "out"}
    return Done({**result, "thumbnail": str(target), "worker": os.getpid()})


if __name__ == "__main__":
    worker.run()
