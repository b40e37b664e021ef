"""Metrics of the stage processor: plain numbers, read at each scrape (`penstock.metrics`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from penstock import metrics
from penstock.core.completion import Fence
from penstock.metrics import Sample
from penstock.metrics.histogram import Histogram
from penstock.postgres.ending import Ending

# Workers name the stages. A name that has a number in it would add a histogram for each task.
MOST_STAGES = 1_000
OTHER_STAGES = "other"


class Metrics:
    """Counters since the process began.

    Attributes:
        ended: attempts that have ended, by outcome and by the resulting state of their task.
        attempts: seconds for which handlers ran, by stage; beyond `MOST_STAGES`, of all others
            together.
        commits: seconds that commits took.
        stale: results that changed nothing.
        late: results of expired attempts that were accepted.
        unhandled: attempts that workers handed back, because they have no handler for the stage.
        swept: events that the sweeper has published.
    """

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        self.attempts: dict[str, Histogram] = {}
        self.commits = Histogram(metrics.COMMIT_SECONDS)
        self.stale = 0
        self.late = 0
        self.unhandled = 0
        self.swept = 0

    def applied(self, endings: Collection[Ending], applied: Collection[Fence]) -> None:
        """Counts the endings that took effect, by their fences."""
        for ending in endings:
            if ending.fence not in applied:
                continue
            self.ended[ending.outcome, ending.conclusion.state] += 1
            if ending.conclusion.unhandled_s:
                self.unhandled += 1
            if not ending.started_ms:
                continue  # the worker reported no start
            stage = ending.fence.stage
            if stage not in self.attempts and len(self.attempts) >= MOST_STAGES:
                stage = OTHER_STAGES
            attempts = self.attempts.get(stage)
            if attempts is None:
                attempts = self.attempts[stage] = Histogram(metrics.ATTEMPT_SECONDS)
            # A clock that was set back during the attempt makes its duration negative.
            attempts.observe(max(ending.finished_ms - ending.started_ms, 0) / 1000)

    def samples(self, *, publishing: int) -> Iterator[Sample]:
        """The current samples.

        Args:
            publishing: transactions whose events are on their way to Kafka.
        """
        for labels, attempts in self.ended.items():
            yield Sample(metrics.ATTEMPTS_ENDED, attempts, labels)
        for stage, histogram in self.attempts.items():
            yield histogram.sample(stage)
        yield self.commits.sample()
        yield Sample(metrics.RESULTS_STALE, self.stale)
        yield Sample(metrics.RESULTS_LATE, self.late)
        yield Sample(metrics.ATTEMPTS_UNHANDLED, self.unhandled)
        yield Sample(metrics.PUBLISHING, publishing)
        yield Sample(metrics.SWEPT, self.swept)
