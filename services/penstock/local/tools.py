"""Kafka's console tools, for the embedded broker, whose packages contain no shell scripts.

    python -m penstock.local.tools console-consumer --bootstrap-server HOST:PORT --topic TOPIC

The arguments are those of the tool. The tool replaces this process, so that it receives the signals
and sets the exit status.
"""

from __future__ import annotations

import os
import sys

from penstock.errors import CannotStart
from penstock.local.jars import class_path, java
from penstock.process import exit_status

TOOLS = {
    "acls": "org.apache.kafka.tools.AclCommand",
    "console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "topics": "org.apache.kafka.tools.TopicCommand",
}
_USAGE = f"usage: python -m penstock.local.tools {{{','.join(TOOLS)}}} [OPTIONS OF THE TOOL]"
_STATUS_USAGE = 2


def command(tool: str, arguments: list[str]) -> list[str]:
    """Returns the command that runs a tool.

    Raises:
        CannotStart: Java or the jars are missing.
    """
    jars = os.pathsep.join(str(jar) for jar in class_path(tools=True))
    quiet = ("-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
    return [str(java()), *quiet, "-cp", jars, TOOLS[tool], *arguments]


def main(arguments: list[str]) -> int:
    """Runs the tool in place of this process; returns an exit status when that fails."""
    if not arguments or arguments[0] not in TOOLS:
        print(_USAGE, file=sys.stderr)  # noqa: T201 (a command line)
        return _STATUS_USAGE
    try:
        argv = command(arguments[0], arguments[1:])
    except CannotStart as error:
        print(error, file=sys.stderr)  # noqa: T201 (a command line)
        return exit_status(error)
    return os.execv(argv[0], argv)  # noqa: S606 (the packaged Java, the user's own arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
