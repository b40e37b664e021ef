"""The proof that queued tasks have no record left, by offsets of each station, compared with a
model."""

import random

from penstock.task_sync.proof import Offsets, Proof, Station


def seen(*partitions):
    return {number: Offsets(*offsets) for number, offsets in enumerate(partitions)}


def test_a_station_is_passed_when_all_its_ends_are_committed():
    """Uncommitted records of one partition prevent the proof."""
    proof = Proof(seen((0, 0, 10), (7, 0, 7)))
    assert not proof.passed(seen((9, 0, 50), (7, 0, 7)))
    assert proof.passed(seen((10, 0, 50), (7, 0, 8)))


def test_stations_follow_the_path_of_a_record():
    """Ready, heartbeats, results: the ends of each are read when the station before is passed."""
    proof = Proof(seen((0, 0, 1)))
    proof.advance(seen((5, 0, 6)))
    assert proof.station is Station.HEARTBEATS
    assert not proof.passed(seen((5, 0, 9)))
    assert proof.passed(seen((6, 0, 9)))
    proof.advance(seen((-1, 0, 0)))
    assert proof.station is Station.RESULTS
    assert proof.passed(seen((-1, 0, 3))), "there was nothing to read when the claims had been read"


def test_deleted_records_prove_nothing_while_they_may_be_in_flight():
    """After deletion of records, only a commit behind a record written later proves that readers
    are past."""
    proof = Proof(seen((10, 0, 30)))
    deleted = seen((10, 30, 30))
    assert not proof.passed(deleted)
    assert proof.needs_marker(deleted) == {0}
    assert proof.needs_marker(seen((10, 30, 31))) == set(), "one marker suffices"
    assert not proof.passed(seen((10, 30, 31)))
    assert proof.passed(seen((31, 30, 31)))
    assert proof.needs_marker(seen((10, 12, 30))) == set(), "readers commit the remaining records"


def test_a_group_without_offsets_has_passed_no_station():
    """Without commits and records, the partition needs a marker, as after any loss."""
    proof = Proof(seen((-1, 30, 30)))
    assert not proof.passed(seen((-1, 30, 30)))
    assert proof.needs_marker(seen((-1, 30, 30))) == {0}


def test_a_commit_of_a_deleted_topic_proves_nothing_about_its_successor():
    """A worker may commit an old position after its topic was recreated."""
    proof = Proof(seen((500, 0, 30)))
    assert not proof.passed(seen((500, 0, 30)))
    assert not proof.passed(seen((500, 0, 600))), "the commit is unchanged although the topic has grown"
    assert proof.passed(seen((30, 0, 600)))


def test_a_replaced_topic_ends_the_proof():
    """The ends belong to another topic."""
    proof = Proof(seen((5, 0, 30), (0, 0, 0)))
    assert not proof.shrunk(seen((5, 0, 30), (0, 0, 0)))
    assert proof.shrunk(seen((-1, 0, 29), (0, 0, 0)))
    assert proof.shrunk(seen((5, 0, 30)))


def test_a_topic_with_another_id_ends_the_proof():
    """The replacement has grown to the same ends."""
    proof = Proof({0: Offsets(5, 0, 30, "one")})
    assert not proof.shrunk({0: Offsets(5, 0, 30, "one")})
    assert not proof.shrunk({0: Offsets(5, 0, 30, None)}), "an older broker tells no id"
    assert proof.shrunk({0: Offsets(5, 0, 30, "two")})


def test_every_partition_of_a_replacement_is_read():
    """Records of the predecessor may be in flight, so an empty partition also needs a marker."""
    proof = Proof(seen((-1, 0, 0)), replaced=True)
    assert not proof.passed(seen((-1, 0, 0)))
    assert proof.needs_marker(seen((-1, 0, 0))) == {0}
    assert proof.passed(seen((1, 0, 1)))
    proof.advance(seen((-1, 0, 0)))
    assert proof.passed(seen((-1, 0, 0))), "the other topics were not replaced"


class RecordPath:
    """A model of the path: attempts move from the ready topic over a claim and a result into
    PostgreSQL.

    Steps happen in any order. A loss deletes unread records of the ready topic.
    """

    def __init__(self, rng):
        self.rng = rng
        self.topics = {station: [] for station in Station}
        self.begin = 0
        self.committed = dict.fromkeys(Station, -1)
        self.position = dict.fromkeys(Station, 0)
        self.in_flight = {station: [] for station in Station}
        self.queued = {}
        self.lost = set()
        self.next_id = 0

    def poll(self, station):
        begin = self.begin if station is Station.READY else 0
        return {0: Offsets(self.committed[station], begin, len(self.topics[station]))}

    def release(self):
        self.queued[self.next_id] = True
        self.topics[Station.READY].append(self.next_id)
        self.next_id += 1

    def lose(self):
        deleted = self.topics[Station.READY][max(self.position[Station.READY], self.begin) :]
        self.lost |= {task for task in deleted if task is not None}
        self.begin = len(self.topics[Station.READY])

    def read(self, station):
        topic = self.topics[station]
        if station is Station.READY:
            self.position[station] = max(self.position[station], self.begin)
        if self.position[station] < len(topic):
            self.in_flight[station].append((self.position[station], topic[self.position[station]]))
            self.position[station] += 1

    def finish(self, station):
        """Processes the oldest record in flight and commits it."""
        if not self.in_flight[station]:
            return
        offset, task = self.in_flight[station].pop(0)
        if task is not None:
            if station is Station.READY:
                self.topics[Station.HEARTBEATS].append(task)
            elif station is Station.HEARTBEATS and self.rng.random() < 0.5:
                self.queued.pop(task, None)  # written as running
            elif station is Station.HEARTBEATS:
                self.topics[Station.RESULTS].append(task)
            else:
                self.queued.pop(task, None)  # its result is committed
        self.committed[station] = offset + 1

    def mark(self, station):
        self.topics[station].append(None)


class Prover:
    """Advances the proof with each poll, as task-sync does."""

    def __init__(self, path):
        self.path = path
        self.proof = None
        self.queued_before = set()

    def poll(self):
        path, proof = self.path, self.proof
        if proof is None:
            self.queued_before = set(path.queued)
            self.proof = Proof(path.poll(Station.READY))
        elif not proof.passed(path.poll(proof.station)):
            for _number in proof.needs_marker(path.poll(proof.station)):
                path.mark(proof.station)
        elif proof.station is not Station.RESULTS:
            proof.advance(path.poll(Station(proof.station.value + 1)))
        else:
            found = self.queued_before & set(path.queued)
            assert found <= path.lost, "a false loss"
            for task in found:
                del path.queued[task]
            self.proof = None


def prove(rng):
    """Takes random steps. The proof reports no false loss meanwhile, and leaves no loss."""
    path = RecordPath(rng)
    prover = Prover(path)
    for turn in range(3000):
        choice = rng.random()
        if choice < 0.22 and turn < 2000:
            (path.release if choice < 0.2 else path.lose)()
        elif choice < 0.5:
            path.read(rng.choice(list(Station)))
        elif choice < 0.8:
            path.finish(rng.choice(list(Station)))
        else:
            prover.poll()
    assert not set(path.queued) & path.lost, "an undetected loss"


def test_the_proof_finds_exactly_the_lost_tasks():
    """For random orders of steps, the proof reports no false loss and finds every loss."""
    for seed in range(100):
        prove(random.Random(seed))
