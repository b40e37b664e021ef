"""The images' HEALTHCHECK: exits with 0 while the service is ready, else with 1 and the reason.

For `penstock run SERVICE` it requests /readyz: of the gateway at its own port, of other services at
their metrics port. For other programs, such as workers, it checks that the file PENSTOCK_READY_FILE
exists, which they create once they serve. The file is on a tmpfs, so it ends with the container.

It is not a verb of `penstock`, whose imports would need twenty times the CPU every few seconds.
"""

import os
import socket
import sys

_TIMEOUT_S = 20.0


def _service(command: bytes) -> str:
    """The argument of `penstock run`; empty when process 1 is another program."""
    words = command.decode(errors="replace").split("\0")
    for before, verb, service in zip(words, words[1:], words[2:]):  # noqa: B905 (of different lengths, by design)
        if before.endswith("penstock") and verb == "run":
            return service
    return ""


def _check_ready(port: int) -> None:
    """Exits with the reason unless /readyz answers 200."""
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
    """Checks the service or the ready file."""
    with open("/proc/1/cmdline", "rb") as file:  # noqa: PTH123 (importing pathlib takes longer than this whole check)
        service = _service(file.read())
    if service == "gateway":
        _check_ready(int(os.environ.get("PENSTOCK_GATEWAY_PORT") or 8420))
    elif service:
        _check_ready(int(os.environ.get("PENSTOCK_METRICS_PORT") or 0))
    else:
        ready_file = os.environ.get("PENSTOCK_READY_FILE", "")
        if not os.path.exists(ready_file):  # noqa: PTH110 (as above)
            sys.exit(f"not ready: there is no {ready_file or 'PENSTOCK_READY_FILE'}")


main()
