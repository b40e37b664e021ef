"""The demo's handlers, without any server: they are plain functions."""

import av
import pytest
from examples.media.clips import make_clips
from examples.media.stages import NotAVideo, probe, thumbnail, transcode


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return make_clips(tmp_path_factory.mktemp("clips"), 1, seconds=0.5)


def test_probe_tells_what_is_in_a_file(clips):
    """Duration, pixels, frames per second and codec."""
    found = probe(clips[0])
    assert (found["width"], found["height"], found["fps"], found["codec"]) == (320, 240, 24.0, "mpeg4")
    assert found["seconds"] == pytest.approx(0.5, abs=0.1)


def test_what_is_no_video_is_told_so(clips):
    """A permanent failure needs a reason a person can use."""
    with pytest.raises(NotAVideo, match=r"broken\.mkv is not a video: Invalid data"):
        probe(clips[-1])


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
