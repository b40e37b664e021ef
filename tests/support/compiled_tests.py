"""Compiles the test modules of a fresh clone once, instead of once in each process of a run.

pytest rewrites the asserts of a module that it imports. For all modules that takes eight seconds of
CPU, and the processes would do it at the same time.
"""

from __future__ import annotations

import sys

import pytest
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    assertstate_key,
    get_cache_dir,
    try_makedirs,
)


def compile_tests(config: pytest.Config) -> None:
    """Writes the compiled modules that are missing or old to the cache that pytest reads."""
    if sys.dont_write_bytecode or assertstate_key not in config.stash:
        return
    for file in (config.rootpath / "tests").rglob("*.py"):
        if not (file.name.startswith("test_") or file.name == "conftest.py"):
            continue
        folder = get_cache_dir(file)
        compiled = folder / (file.name.removesuffix(".py") + PYC_TAIL)
        if try_makedirs(folder) and _read_pyc(file, compiled) is None:
            source_hash, code = _rewrite_test(file, config)
            _write_pyc(config.stash[assertstate_key], code, source_hash, compiled)
