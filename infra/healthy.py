"""The images' HEALTHCHECK: status 0 while the service of this container is ready, else 1 and a line that says why.

Asks GET /readyz of the service that process 1 runs (`penstock run SERVICE`): the gateway at its own port, the others at their metrics
port. Anything else, a worker above all, has left the mark PENSTOCK_READY_FILE once it served; on a tmpfs it goes with the container.
Not a verb of `penstock`, whose imports would take twenty times the CPU every few seconds: standard library, and little of it.
"""

import os
import socket
import sys

_TIMEOUT_S = 20.0


def _service(command: bytes) -> str:
    """What `penstock run` was given; empty when process 1 runs something else."""
    words = command.decode(errors="replace").split("\0")
    for before, verb, service in zip(words, words[1:], words[2:]):  # noqa: B905 (of different lengths, by design)
        if before.endswith("penstock") and verb == "run":
            return service
    return ""


def _ask(port: int) -> None:
    """Leaves the process unless /readyz is answered by 200."""
    try:
        with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
            connection.sendall(b"GET /readyz HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
            with connection.makefile("rb") as answer:
                status = answer.readline(200).decode(errors="replace").strip()
                if status.split(" ")[1:2] != ["200"]:
                    body = answer.read(4000).decode(errors="replace").partition("\r\n\r\n")[2]
                    sys.exit(f"/readyz at port {port} answered {status or 'nothing'}: {body}")
    except OSError as error:
        sys.exit(f"/readyz at port {port}: {error}")


def main() -> None:
    """Decides whom to ask."""
    with open("/proc/1/cmdline", "rb") as file:  # noqa: PTH123 (pathlib takes longer to import than all of this to run)
        service = _service(file.read())
    if service == "gateway":
        _ask(int(os.environ.get("PENSTOCK_GATEWAY_PORT") or 8420))
    elif service:
        _ask(int(os.environ.get("PENSTOCK_METRICS_PORT") or 0))
    else:
        mark = os.environ.get("PENSTOCK_READY_FILE", "")
        if not os.path.exists(mark):  # noqa: PTH110 (as above)
            sys.exit(f"not ready: there is no {mark or 'PENSTOCK_READY_FILE'}")


main()
