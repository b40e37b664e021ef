"""Generates video clips of moving patterns for the demo, and one file that is not a video.

python -m examples.media.clips FOLDER [COUNT]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import av
from PIL import Image, ImageDraw

FPS = 24
SIZES = ((320, 240), (480, 270), (640, 360))


def make_clips(folder: Path, count: int, seconds: float = 2.0, longest_s: float | None = None) -> list[Path]:
    """Writes `count` clips and a broken file; returns their paths, the broken one last.

    The last clip is large and takes `longest_s` seconds, so that its progress can be watched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(count):
        target = folder / f"clip-{number + 1}.mkv"
        size, length_s = SIZES[number % len(SIZES)], seconds + number % 3 * 0.5
        if longest_s is not None and number == count - 1:
            size, length_s = SIZES[-1], longest_s
        write_clip(target, size, length_s, number)
        files.append(target)
    broken = folder / "broken.mkv"
    broken.write_bytes(b"This is not a video. " * 50)
    return [*files, broken]


def write_clip(target: Path, size: tuple[int, int], seconds: float, seed: int) -> None:
    """Writes one clip of a ball that moves over a changing background."""
    with av.open(str(target), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for image in _frames(size, round(seconds * FPS), seed):
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))


def _frames(size: tuple[int, int], count: int, seed: int) -> Iterator[Image.Image]:
    width, height = size
    radius = height // 8
    for number in range(count):
        turn = number / count * math.tau
        ground = tuple(int(110 + 70 * math.sin(turn + seed + shift)) for shift in (0, 2, 4))
        image = Image.new("RGB", size, ground)
        x = width / 2 + (width / 2 - radius) * math.cos(turn + seed)
        y = height / 2 + (height / 2 - radius) * math.sin(2 * turn)
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=(250, 240, 210))
        yield image


if __name__ == "__main__":
    for clip in make_clips(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        print(clip)
