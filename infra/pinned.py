"""Prints the lines of constraints.txt that pin one package: `python infra/pinned.py uv`."""

import re
import sys
from pathlib import Path

text = (Path(__file__).parents[1] / "constraints.txt").read_text()
found = re.search(rf"^{re.escape(sys.argv[1])}==(?:.*\\\n)*.*\n?", text, re.MULTILINE)
if found is None:
    sys.exit(f"constraints.txt pins no {sys.argv[1]}")
print(found.group())
