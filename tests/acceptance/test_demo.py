"""The first command of the README."""

import asyncio
import os
import re
import sys


async def test_the_demo_runs_end_to_end(tmp_path):
    """The demo sends real files through three stages on a real broker and database. It prints the
    results and a task's log, verifies signed callbacks and events, recovers a flow, and stops
    everything."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "examples.media.demo",
        "--out",
        str(tmp_path / "out"),
        "--clips",
        "3",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "160"},
    )
    printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, printed
    assert "3 succeeded, 1 failed; 4 callbacks with the right signature; penstock check: clean" in printed
    assert "broken.mkv is not a video" in printed
    assert "failed: node 'load' failed: 1 of 6 items did not succeed" in printed
    assert "approved by ana; 1 file was loaded again" in printed
    assert "INFO    probed file=clip-1.mkv" in printed
    assert "transcoding about " in printed
    assert "INFO    wrote the thumbnail file=clip-1.jpg" in printed
    assert re.search(r"penstock logs \d+ --data-dir ", printed)
    # The libraries' own entries about a topic that was just created.
    assert "Error" not in printed
    assert {f"clip-{n}.{kind}" for n in (1, 2, 3) for kind in ("mp4", "jpg")} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
