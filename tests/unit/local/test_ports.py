"""Deployments that start at the same time choose different ports."""

import socket
import subprocess
import sys

from penstock.local.ports import LOOPBACK, choose_port

CHOOSE = "import sys; from penstock.local.ports import choose_port; print(choose_port(int(sys.argv[1])), flush=True); input()"


def start(port):
    return subprocess.Popen(
        [sys.executable, "-c", CHOOSE, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_two_processes_do_not_choose_the_same_preferred_port():
    """O1: a server listens seconds after its port was chosen. The choice ends with its process."""
    port = choose_port()
    with start(port) as first:
        assert int(first.stdout.readline()) == port
        with start(port) as second:
            assert int(second.stdout.readline()) != port
            second.communicate("")
        first.communicate("")
    with start(port) as third:
        assert int(third.stdout.readline()) == port
        third.communicate("")


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
