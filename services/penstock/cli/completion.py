"""The verb that prints the completion of a shell."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

_PROGRAM = "penstock"
# The script of a shell sets this variable when it asks for a completion; click reads it.
_VARIABLE = "_PENSTOCK_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Prints the completion of a shell: verbs, options, task types, flows, schedules and targets.

    Put `eval "$(penstock completion bash)"` into ~/.bashrc, or the same for zsh into ~/.zshrc. For
    fish, write the output to ~/.config/fish/completions/penstock.fish.

    Names come from the gateway of the options and of the environment, within a second.
    """
    found = get_completion_class(shell)
    assert found is not None
    # Not the method of the class for bash, which starts a bash to read its version.
    click.echo(ShellComplete.source(found(ctx.find_root().command, {}, _PROGRAM, _VARIABLE)))
