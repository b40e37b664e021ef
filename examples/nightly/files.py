"""Makes the files of six shops, one of which is damaged.

python files.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

SHOPS = 6
DAMAGED = "shop-3.csv"


def make_files(folder: Path) -> None:
    """Writes one CSV file for each shop."""
    folder.mkdir(parents=True, exist_ok=True)
    for shop in range(1, SHOPS + 1):
        (folder / f"shop-{shop}.csv").write_text(f"hour,sales\n9,{shop * 10}\n10,{shop * 20}\n")
    (folder / DAMAGED).write_text("hour,sales\n9,30\n10,sixty\n")


def mend(folder: Path) -> None:
    """Replaces the damaged file."""
    (folder / DAMAGED).write_text("hour,sales\n9,30\n10,60\n")


if __name__ == "__main__":
    make_files(Path(sys.argv[1]))
