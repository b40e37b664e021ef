"""Deployments that start at the same time choose different ports."""

import random
import socket
import subprocess
import sys

import pytest

from penstock.local.ports import LOOPBACK, choose_port, is_free

CHOOSE = "import sys; from penstock.local.ports import choose_port; print(choose_port(int(sys.argv[1])), flush=True); input()"


def start(port):
    return subprocess.Popen(
        [sys.executable, "-c", CHOOSE, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_two_processes_do_not_choose_the_same_preferred_port():
    """O1: a server listens seconds after its port was chosen. The choice ends with its process."""
    port = next(port for port in random.sample(range(20_000, 32_000), 12_000) if is_free(port))
    with start(port) as first:
        assert int(first.stdout.readline()) == port
        with start(port) as second:
            assert int(second.stdout.readline()) != port
            second.communicate("")
        first.communicate("")
    with start(port) as third:
        assert int(third.stdout.readline()) == port
        third.communicate("")


def test_a_process_does_not_choose_what_another_has_chosen(monkeypatch):
    """O1: also without a preference. Nothing listens on the port of the other process yet."""
    with start(0) as other:
        port = int(other.stdout.readline())
        monkeypatch.setattr("penstock.local.ports._CHOICE", range(port, port + 1))
        with pytest.raises(OSError, match="no free port"):
            choose_port()
        other.communicate("")
    assert choose_port() == port


def test_a_process_keeps_its_preferred_port():
    """A server that is started again in one process gets its port again."""
    port = choose_port()
    assert choose_port(port) == port
    assert choose_port(port) == port


def test_a_port_that_is_taken_is_not_chosen():
    """A preferred port with a listener gives way to another."""
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        assert choose_port(taken.getsockname()[1]) != taken.getsockname()[1]
