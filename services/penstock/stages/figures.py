"""What the stage processor counts of itself, in plain numbers, read when somebody asks (`penstock.metrics`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from penstock import metrics
from penstock.core.completion import Fence
from penstock.metrics import Sample
from penstock.metrics.histogram import Histogram
from penstock.postgres.advance import Ending


class Figures:
    """What has happened until now.

    Attributes:
        ended: attempts that have ended, by outcome and by the state of their task then.
        attempts: seconds for which handlers ran, by stage.
        commits: seconds that commits took.
        vain: results that changed nothing.
        late: results of expired attempts that were accepted.
        swept: events that a crash had left.
    """

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        self.attempts: dict[str, Histogram] = {}
        self.commits = Histogram(metrics.COMMIT_SECONDS)
        self.vain = 0
        self.late = 0
        self.swept = 0

    def applied(self, endings: Collection[Ending], applied: Collection[Fence]) -> None:
        """Of these endings those with these fences have taken effect."""
        for ending in endings:
            if ending.fence not in applied:
                continue
            self.ended[ending.outcome, ending.verdict.state] += 1
            if not ending.started_ms:
                continue  # nobody has said when it began
            attempts = self.attempts.get(ending.fence.stage)
            if attempts is None:
                attempts = self.attempts[ending.fence.stage] = Histogram(metrics.ATTEMPT_SECONDS)
            # Of a clock that was set back meanwhile nothing better is known.
            attempts.see(max(ending.finished_ms - ending.started_ms, 0) / 1000)

    def samples(self, *, publishing: int) -> Iterator[Sample]:
        """Everything as it is now.

        Args:
            publishing: transactions whose events are on their way.
        """
        for labels, attempts in self.ended.items():
            yield Sample(metrics.ENDED, attempts, labels)
        for stage, histogram in self.attempts.items():
            yield histogram.sample(stage)
        yield self.commits.sample()
        yield Sample(metrics.RESULTS_VAIN, self.vain)
        yield Sample(metrics.RESULTS_LATE, self.late)
        yield Sample(metrics.PUBLISHING, publishing)
        yield Sample(metrics.SWEPT, self.swept)
