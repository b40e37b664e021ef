"""The folders of the tests' servers, which are in memory if the system allows it.

Each test makes a database and topics of its own, which are hundreds of small files. On a disk their
creation and removal costs ten times the processor time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")
# A run with all its embedded servers stays below it.
_NEEDED_BYTES = 6 * 2**30
# The folders of a failed or killed run are kept for a day.
_KEPT_S = 86_400
_PREFIX = "penstock-"


def _has_room() -> bool:
    if not _MEMORY.is_dir() or not os.access(_MEMORY, os.W_OK):
        return False
    # Some tests run programs that they write into their folder.
    runs_programs = not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
    return runs_programs and shutil.disk_usage(_MEMORY).free > _NEEDED_BYTES


def remove_old() -> None:
    """Removes the folders that earlier runs have left in memory."""
    for folder in _MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(folder)


def make_folder(prefix: str = _PREFIX) -> Path:
    """A new, empty folder of this test or run, which removes it."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY if _has_room() else None))
