"""The documentation is complete: requirement ids, decisions, glossary."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.kafka.topology.services import SERVICES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REQUIREMENT = re.compile(r"\b[A-Z]\d{1,2}[a-c]?\b")


def test_every_requirement_that_a_test_cites_is_defined() -> None:
    """Docstrings of tests cite ids of docs/requirements.md."""
    defined = set(
        re.findall(r"^\| ([A-Z]\d+[a-c]?) \|", (DOCS / "requirements.md").read_text(), re.MULTILINE)
    )
    cited: dict[str, str] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        for docstring in re.findall(r'"""(.*?)"""', file.read_text(), re.DOTALL):
            head = re.match(r"[A-Z0-9a-c, ]+(?:to [A-Z]\d+)?:", docstring)
            cited |= dict.fromkeys(REQUIREMENT.findall(head[0]) if head else [], file.name)
    assert len(cited) > 40
    assert {name: file for name, file in cited.items() if name not in defined} == {}


def test_every_decision_is_in_the_index() -> None:
    """A decision that no page links to is not found: number, title and file agree."""
    index = (DOCS / "decisions" / "index.md").read_text()
    pages = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    assert len(pages) > 20
    for page in pages:
        number, _, title = page.read_text().partition("\n")[0].removeprefix("# ").partition(" · ")
        assert page.name.startswith(f"{number}-")
        assert f"| {number} | [{title}]({page.name}) |" in index
    assert len(re.findall(r"^\| \d", index, re.MULTILINE)) == len(pages)


def test_the_glossary_has_each_word_once() -> None:
    """One word for one thing."""
    words_of_prose = (DOCS / "glossary.md").read_text().partition("## Words of the wire")[0]
    cells = re.findall(r"^\| ([^|]+) \| ", words_of_prose, re.MULTILINE)
    words = [word.strip() for cell in cells if cell not in {"word", "---"} for word in cell.split(",")]
    assert len(words) > 80
    assert len(words) == len(set(words))


def test_the_map_is_short() -> None:
    """ARCHITECTURE.md is the map; reasons are decisions."""
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) < 150


def pages() -> list[Path]:
    return [
        ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
    ] + sorted(DOCS.rglob("*.md"))


def test_files_that_pages_name_exist() -> None:
    """A renamed file is renamed in the pages: paths are those of the tree, or of the package."""
    package = ROOT / "services" / "penstock"
    folders = {path.name for path in (*ROOT.iterdir(), *package.iterdir()) if path.is_dir()} - {"docs"}
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages()
        for path in re.findall(r"`([a-z_]+/[a-z0-9_./-]+)`", page.read_text())
        if path.partition("/")[0] in folders
        and not any((base / f"{path}{suffix}").exists() for base in (ROOT, package) for suffix in ("", ".py"))
    ]
    assert missing == []


def test_modules_of_the_map_exist() -> None:
    """The last table of ARCHITECTURE.md names modules of each service."""
    package = ROOT / "services" / "penstock"
    table = (ROOT / "ARCHITECTURE.md").read_text().rpartition("| service | main modules |")[2]
    rows = re.findall(r"^\| ([a-z-]+) \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) > 4
    missing = [
        f"{service}: {name}"
        for service, cells in rows
        for name in re.findall(r"`([a-z_/]+)`", cells)
        if not any(
            (base / f"{name}.py").exists()
            for base in (package / (SERVICES[service].package if service in SERVICES else service), package)
        )
    ]
    assert missing == []
