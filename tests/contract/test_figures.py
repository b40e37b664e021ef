"""The figures of the docs are those of result files, and their commands exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def module_exists(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def figures(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())["figures"]


def found(pattern: str) -> list[tuple[str, str]]:
    """Each match of a pattern with one group, with its page."""
    return [(page.name, each) for page in PAGES for each in re.findall(pattern, page.read_text())]


def test_a_benchmark_that_a_page_names_exists() -> None:
    """O14: a target, module or result file of a benchmark that a page names exists."""
    makefile = (ROOT / "Makefile").read_text()
    targets, modules = found(r"make bench-([a-z_-]+[a-z])"), found(r"python -m (benchmarks[.\w]*\w)")
    files = found(r"results/([a-z_-]+\.jsonl?)")
    assert len(targets) > 10
    missing = [
        one
        for one in targets
        if f"\nbench-{one[1]}:" not in makefile and not module_exists(f"benchmarks.{one[1]}")
    ]
    missing += [one for one in modules if not module_exists(one[1])]
    missing += [one for one in files if not (RESULTS / one[1]).exists()]
    assert missing == []


def test_a_result_file_names_a_command_that_exists() -> None:
    """O14: each figure can be measured again by the command beside it."""
    files = sorted(RESULTS.glob("*.json"))
    assert len(files) > 10
    for file in files:
        result = json.loads(file.read_text())
        assert result["benchmark"] == file.stem
        [(module, argument)] = re.findall(r"python -m ([\w.]+) ?(\S*)", result["command"])
        assert (ROOT / argument).exists() if module == "pytest" else module_exists(module), file.name


def test_a_test_that_a_page_names_exists() -> None:
    """O14: a page that says which test shows a claim names one that exists."""
    named = [
        (page, *test)
        for page in PAGES
        for test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    ]
    assert len(named) > 20
    for page, path, name in named:
        assert (ROOT / path).exists(), (page.name, path)
        assert not name or f"def {name}(" in (ROOT / path).read_text(), (page.name, name)


def test_the_table_of_the_readme_is_that_of_the_result_files() -> None:
    """O14: README.md shows what its benchmarks found last."""
    page = (ROOT / "README.md").read_text()
    latency, throughput, part = figures("latency"), figures("throughput"), figures("part_load")

    def row(values: dict[str, Any], name: str, text: str) -> str:
        ours, bare = values["Penstock"][name], values["bare loop"][name]
        ratio = f"{ours / bare:.1f}" if ours / bare > 1 else f"{ours / bare:.2f}"
        return f"{text.format(ours)} | {text.format(bare)} | {ratio} |"

    assert f"| three stages, median at 30 tasks/s | {row(latency, 'whole p50 (ms)', '{:.1f} ms')}" in page
    assert (
        f"| first stage, median at 30 tasks/s | {row(latency, 'first stage p50 (ms)', '{:.1f} ms')}" in page
    )
    assert f"| throughput, submitted in batches | {row(throughput, 'tasks/s', '{:,} tasks/s')}" in page
    assert f"| CPU of a task at that rate | {row(throughput, 'CPU ms/task', '{:.2f} ms')}" in page
    assert f"| CPU of a task at 80 tasks/s | {row(part, 'all', '{:.1f} ms')}" in page
    [waiting] = [row["p50 (ms)"] for name, row in figures("results").items() if "many waiters" in name]
    assert re.search(rf"\| end of a task to the answer .* 10,000 waiting \| {waiting} ms \|", page)


def test_the_table_of_replicas_is_that_of_the_result_file() -> None:
    """O14: the sizing page shows what `make bench-scaling` found last."""
    page = (ROOT / "docs" / "deploy" / "scaling.md").read_text()
    columns = ("CPU ms/task", "own", "kafka", "postgres", "workers", "stages", "task-sync", "heartbeats")
    for name, values in figures("scaling").items():
        cells = [f"{values['tasks/s']:,.0f}", *(f"{values[column]:.2f}" for column in columns)]
        assert f"| {name} | {' | '.join(cells)} | {values['at rest, ms/s']:.0f} |" in page


def test_the_comparison_says_what_the_result_files_say() -> None:
    """O14: the ratios to Celery, and the cost by load, are those that the benchmarks found last."""
    page = (ROOT / "docs" / "explanation" / "comparison.md").read_text()
    peers, scaling = figures("peers"), figures("scaling")
    ratios = [
        peers[f"Penstock, {way}"][rate]["CPU ms"]["all"] / peers["Celery on Redis"][rate]["CPU ms"]["all"]
        for way in ("topic", "HTTP")
        for rate in ("30", "80")
    ]
    assert f"Penstock costs {min(ratios):.1f} to {max(ratios):.1f} times" in page
    full, quarter = scaling["1 of each"], scaling["1 of each, 1/4 of the load"]
    assert f"{full['CPU ms/task']:.2f} ms of CPU for a task of three stages under full load" in page
    assert f"and {quarter['CPU ms/task']:.2f} ms at a quarter of it" in page
    assert f"used {full['at rest, ms/s'] / 1000:.2f} s of CPU a second" in page


def test_the_page_of_ceilings_has_figures_of_its_result_file() -> None:
    """O14: the figures of one task and of commits are those that `make bench-ceilings` found."""
    page = (ROOT / "docs" / "explanation" / "ceilings.md").read_text()
    found = figures("ceilings")
    task = found["a task of three stages"]
    assert f"| log of PostgreSQL | {task['log KiB']:.1f} KiB |" in page
    for name, row in found.items():
        for place in ("one database", "two databases of one server", "two servers"):
            if name.endswith(f"{place}, commits/s"):
                assert f"| {place} | {row['without notification']:,} | {row['with notification']:,} |" in page
