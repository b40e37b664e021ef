"""The proof that queued tasks have no record left: by offsets, station by station, against a model of the way."""

import random

import pytest

from penstock.task_sync.proof import Offsets, Proof, Station


def seen(*partitions):
    return {number: Offsets(*offsets) for number, offsets in enumerate(partitions)}


def test_a_station_is_passed_when_its_readers_have_committed_past_all_its_ends():
    """What one partition still holds is enough to prove nothing."""
    proof = Proof(seen((0, 0, 10), (7, 0, 7)))
    assert not proof.passed(seen((9, 0, 50), (7, 0, 7)))
    assert proof.passed(seen((10, 0, 50), (7, 0, 8)))


def test_stations_come_in_the_order_of_the_way():
    """Ready, heartbeats, results: each with the ends that were there when the one before was passed."""
    proof = Proof(seen((0, 0, 1)))
    proof.go_on(seen((5, 0, 6)))
    assert proof.station is Station.HEARTBEATS
    assert not proof.passed(seen((5, 0, 9)))
    assert proof.passed(seen((6, 0, 9)))
    proof.go_on(seen((-1, 0, 0)))
    assert proof.station is Station.RESULTS
    assert proof.passed(seen((-1, 0, 3))), "there was nothing to read when the claims had been read"


def test_records_that_are_gone_prove_nothing_while_a_reader_may_have_them_in_hand():
    """Retention, delete_records: only a commit behind what is written there now tells that readers are past."""
    proof = Proof(seen((10, 0, 30)))
    gone = seen((10, 30, 30))
    assert not proof.passed(gone)
    assert proof.unreadable(gone) == {0}
    assert proof.unreadable(seen((10, 30, 31))) == set(), "marked once: the mark will be read"
    assert not proof.passed(seen((10, 30, 31)))
    assert proof.passed(seen((31, 30, 31)))
    assert proof.unreadable(seen((10, 12, 30))) == set(), "something is left, which will be read"


def test_a_group_that_has_forgotten_its_offsets_has_passed_nothing():
    """Nothing committed and everything expired: marked, like any loss."""
    proof = Proof(seen((-1, 30, 30)))
    assert not proof.passed(seen((-1, 30, 30)))
    assert proof.unreadable(seen((-1, 30, 30))) == {0}


def test_a_commit_of_a_topic_that_was_deleted_says_nothing_about_its_successor():
    """A worker may commit an old position once more after its topic was made anew."""
    proof = Proof(seen((500, 0, 30)))
    assert not proof.passed(seen((500, 0, 30)))
    assert not proof.passed(seen((500, 0, 600))), "still the same commit, however long the topic has become"
    assert proof.passed(seen((30, 0, 600)))


def test_a_topic_that_is_replaced_meanwhile_ends_the_proof():
    """Its ends are another topic's."""
    proof = Proof(seen((5, 0, 30), (0, 0, 0)))
    assert not proof.shrunk(seen((5, 0, 30), (0, 0, 0)))
    assert proof.shrunk(seen((-1, 0, 29), (0, 0, 0)))
    assert proof.shrunk(seen((5, 0, 30)))


def test_of_a_replacement_every_partition_is_read_once():
    """Its predecessor's records may be in workers' hands; a partition that never held anything is marked, too."""
    proof = Proof(seen((-1, 0, 0)), replaced=True)
    assert not proof.passed(seen((-1, 0, 0)))
    assert proof.unreadable(seen((-1, 0, 0))) == {0}
    assert proof.passed(seen((1, 0, 1)))
    proof.go_on(seen((-1, 0, 0)))
    assert proof.passed(seen((-1, 0, 0))), "the other topics were not replaced"


class Way:
    """A model: attempts move from the ready topic over a claim and a result into PostgreSQL, one step at a time,
    in any order; a loss takes records that nobody has read off the ready topic."""

    def __init__(self, chance):
        self.chance = chance
        self.topics = {station: [] for station in Station}
        self.begin = 0
        self.committed = dict.fromkeys(Station, -1)
        self.position = dict.fromkeys(Station, 0)
        self.in_hand = {station: [] for station in Station}
        self.queued = {}
        self.lost = set()
        self.next_id = 0

    def look(self, station):
        begin = self.begin if station is Station.READY else 0
        return {0: Offsets(self.committed[station], begin, len(self.topics[station]))}

    def release(self):
        self.queued[self.next_id] = True
        self.topics[Station.READY].append(self.next_id)
        self.next_id += 1

    def lose(self):
        gone = self.topics[Station.READY][max(self.position[Station.READY], self.begin) :]
        self.lost |= {task for task in gone if task is not None}
        self.begin = len(self.topics[Station.READY])

    def read(self, station):
        topic = self.topics[station]
        if station is Station.READY:
            self.position[station] = max(self.position[station], self.begin)
        if self.position[station] < len(topic):
            self.in_hand[station].append((self.position[station], topic[self.position[station]]))
            self.position[station] += 1

    def finish(self, station):
        """What the oldest record in hand says goes on; then it is committed."""
        if not self.in_hand[station]:
            return
        offset, task = self.in_hand[station].pop(0)
        if task is not None:
            if station is Station.READY:
                self.topics[Station.HEARTBEATS].append(task)
            elif station is Station.HEARTBEATS and self.chance.random() < 0.5:
                self.queued.pop(task, None)  # written as running
            elif station is Station.HEARTBEATS:
                self.topics[Station.RESULTS].append(task)
            else:
                self.queued.pop(task, None)  # its result is committed
        self.committed[station] = offset + 1

    def mark(self, station):
        self.topics[station].append(None)


class Prover:
    """Looks once a turn, as task-sync does."""

    def __init__(self, way):
        self.way = way
        self.proof = None
        self.before = set()

    def look(self):
        way, proof = self.way, self.proof
        if proof is None:
            self.before = set(way.queued)
            self.proof = Proof(way.look(Station.READY))
        elif not proof.passed(way.look(proof.station)):
            for _number in proof.unreadable(way.look(proof.station)):
                way.mark(proof.station)
        elif proof.station is not Station.RESULTS:
            proof.go_on(way.look(Station(proof.station.value + 1)))
        else:
            found = self.before & set(way.queued)
            assert found <= way.lost, "a false loss"
            for task in found:
                del way.queued[task]
            self.proof = None


@pytest.mark.parametrize("seed", range(200))
def test_what_is_proven_lost_is_lost_and_every_loss_is_proven(seed):
    """Against a model in which everything happens in any order: no false loss, and none that is never found."""
    chance = random.Random(seed)
    way = Way(chance)
    prover = Prover(way)
    for turn in range(3000):
        deed = chance.random()
        if deed < 0.22 and turn < 2000:
            (way.release if deed < 0.2 else way.lose)()
        elif deed < 0.5:
            way.read(chance.choice(list(Station)))
        elif deed < 0.8:
            way.finish(chance.choice(list(Station)))
        else:
            prover.look()
    assert not set(way.queued) & way.lost, "a loss that was never found"
