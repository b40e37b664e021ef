"""The command line: `penstock`, or `python -m penstock`.

Every verb takes `--json`, which prints one JSON document a line on standard output. Progress and
errors go to standard error. With `--json` an error is one document: `error`, `exit_status`,
`faults`, and `next`, what to do. The exit statuses are:

    0    done
    1    done, with a bad outcome: a watched task or a simulated flow did not succeed, or a service
         failed
    2    the command line is wrong
    3    refused: the input is invalid, or the state or the API key does not allow it
    4    not found
    5    the gateway, Kafka or PostgreSQL cannot be reached
    6    cannot start: a setting is wrong, Kafka refuses this user, a port or directory is in use,
         or a package is missing
    7    a task or callback is in limbo: `penstock check` found it, or --repair could not repair it
    8    the topics differ from their declaration: `penstock topics plan` found it, or `apply` could
         not change them
    70   a service did not drain in time, or received a second signal to stop
    130  interrupted by Ctrl-C

A verb imports the packages of services when it runs. An installation with the SDK alone therefore
shows every verb in its help. A verb whose package is missing names the command that installs it.
"""

from penstock.cli.main import main

__all__ = ["main"]
