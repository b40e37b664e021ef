"""How tests are distributed over the processes of pytest-xdist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Tests that load the whole machine, or measure time, run after all others, one at a time.
ALONE = "alone"
_MARKED_ALONE = re.compile(r"^@pytest\.mark\.alone\n(?:[@#].*\n)*(?:async )?def (\w+)", re.MULTILINE)
_FILE_ALONE = re.compile(r"^pytestmark = pytest\.mark\.alone$", re.MULTILINE)
_FOLDERS = {"load": ALONE, "containers": ALONE, "helm": "helm"}
# Files whose tests share a service, which one process starts once; and those that share a broker.
_SHARED = 'scope="module"'
_SECURE_KAFKA = "secure_kafka"


@cache
def _text(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")


@cache
def _marked_alone(file: str) -> frozenset[str]:
    return frozenset(_MARKED_ALONE.findall(_text(file)))


@cache
def _file_is_alone(file: str) -> bool:
    return _FILE_ALONE.search(_text(file)) is not None


def scope_of(nodeid: str) -> str:
    """The tests of one scope run in one process, in their order; by default a test is a scope of
    its own.

    The controller knows tests by their ids only: it reads the files for marks and fixtures.
    """
    file, _, name = nodeid.partition("::")
    if (folder := file.split("/")[1]) in _FOLDERS:
        return _FOLDERS[folder]
    if _file_is_alone(file) or name.partition("[")[0] in _marked_alone(file):
        return ALONE
    if _SECURE_KAFKA in _text(file):
        return _SECURE_KAFKA
    return file if _SHARED in _text(file) else nodeid


class Scheduling(LoadScopeScheduling):
    """Gives each scope to the next free process; the scope `ALONE` begins when nothing else runs.

    xdist's own groups do not work with pytest 9.2, which no longer lets xdist rename tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self.assigned_work[node]:
            self._order()
        super()._assign_work_unit(node)

    def _order(self) -> None:
        """Whole files come first, so that none of them is left to one process at the end. The scope
        that has to be alone comes last."""
        for scope in [scope for scope in self.workqueue if "::" not in scope][::-1]:
            self.workqueue.move_to_end(scope, last=scope == ALONE)

    def _reschedule(self, node: WorkerController) -> None:
        """Keeps one test beyond the running one at each process: xdist's workers need to know
        the next test."""
        if node.shutting_down or not self.workqueue:
            super()._reschedule(node)
        elif set(self.workqueue) == {ALONE}:
            self._prepare_alone()
        elif self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """A process that is shutting down may have finished the last test but those of `ALONE`."""
        super().mark_test_complete(node, item_index, duration)
        if set(self.workqueue) == {ALONE}:
            self._prepare_alone()

    def remove_node(self, node: WorkerController) -> str | None:
        """As above, for a process that has ended."""
        crashed = super().remove_node(node)
        if set(self.workqueue) == {ALONE} and self.assigned_work:
            self._prepare_alone()
        return crashed

    def _prepare_alone(self) -> None:
        """Keeps one process, lets the others end, and gives it the scope `ALONE` when they have
        run all their tests."""
        active = [node for node in self.assigned_work if not node.shutting_down]
        if not active:
            return
        kept, *others = active
        for node in others:
            node.shutdown()
        elsewhere = sum(
            self._pending_of(units) for node, units in self.assigned_work.items() if node is not kept
        )
        # The kept process does not begin its last test before it knows the next one.
        if elsewhere == 0 and self._pending_of(self.assigned_work[kept]) <= 1:
            self._assign_work_unit(kept)
            super()._reschedule(kept)
