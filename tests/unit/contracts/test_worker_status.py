"""Records of workers about themselves."""

from penstock.contracts.inbound_workers import decode_statuses
from penstock.contracts.worker_status import RECORD_BYTES, encode_statuses
from penstock.core.attempt import AttemptId
from penstock.core.worker_list import OfType, WorkerStatus


def test_a_gateway_with_many_workers_writes_several_records():
    """H5: each record is far below the limit, names the gateway, and has each worker once."""
    gateway = WorkerStatus(id="g", kind="gateway", host="h", interval_s=5.0, types={"t": OfType()})
    held = OfType(None, 100, tuple(AttemptId(2**62 + number, 7, 3) for number in range(100)))
    workers = [
        WorkerStatus(id=f"w{number}", kind="http", host="10.0.0.1", interval_s=45.0, types={"t": held})
        for number in range(500)
    ]
    values = list(encode_statuses(gateway, workers))
    assert len(values) > 1
    assert max(map(len, values)) < RECORD_BYTES * 1.1
    found = [decode_statuses(value) for value in values]
    assert all(first == gateway for first, *_ in found)
    assert [each for _gateway, *over_http in found for each in over_http] == workers


def test_a_gateway_without_workers_writes_one_small_record():
    """H5: an idle deployment has little traffic."""
    gateway = WorkerStatus(id="g", kind="gateway", host="h", interval_s=5.0)
    [value] = encode_statuses(gateway)
    assert decode_statuses(value) == [gateway]
    assert len(value) < 100
