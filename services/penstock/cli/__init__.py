"""The command line: `penstock`, or `python -m penstock`.

Every verb takes `--json`, which prints one JSON document a line on standard output; progress and errors go to
standard error. Exit statuses:

    0    done
    1    done, but something is amiss: a watched task did not succeed, a service failed
    2    the command line itself is wrong
    3    refused: the input is invalid, the thing is not in a state for it, or the API key does not allow it
    4    not found
    5    something cannot be reached: the gateway, Kafka, PostgreSQL
    6    cannot start: a setting is wrong, Kafka refuses this user, a port or directory is taken, or a package or part is missing
    7    something is in limbo: `penstock check` found it, or --repair could not put it back
    8    the topics are not as declared: `penstock topics plan` found it, or `apply` had to leave something
    70   a service did not drain in time, or was asked twice to stop
    130  interrupted by Ctrl-C

What a verb needs beyond the client is imported when the verb runs, so that the worker's installation has them all
in its help, and a missing package is named with the command that installs it.
"""

from penstock.cli.main import main

__all__ = ["main"]
