"""Groups of verbs: what they print about an unknown verb, and verbs that are imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem


def summarize(verb: click.Command) -> None:
    """Gives a verb, and those below it, a summary: its help text up to a stop or semicolon.

    Click would cut the first sentence anywhere.
    """
    sentence = " ".join((verb.help or "").partition("\n\n")[0].split())
    verb.short_help = verb.short_help or sentence.partition(";")[0].removesuffix(".")
    if isinstance(verb, click.Group):
        for below in verb.commands.values():
            summarize(below)


class Group(click.Group):
    """A group whose error about an unknown verb names the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb and its arguments.

        Raises:
            click.UsageError: there is no such verb.
        """
        name = args[0]
        known = name.startswith("-") or self.get_command(ctx, name) is not None
        if not known and not ctx.resilient_parsing:
            nearest = get_close_matches(name, self.list_commands(ctx))
            hint = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def add_list(self, summary: str) -> None:
        """Adds the verb `list`, which does what this group does without a verb."""
        self.add_command(
            click.Command("list", callback=self.callback, params=list(self.params), help=summary)
        )


class LazyVerb(NamedTuple):
    """A verb that is imported when it is used.

    Attributes:
        module: full name of the module that has the verb.
        attribute: name of the verb in it.
        summary: as `summarize` would give it, so that a list of verbs imports none.
    """

    module: str
    attribute: str
    summary: str


class LazyGroup(Group):
    """A group that imports a verb when it is used: each verb would wait for the imports of all.

    Args:
        verbs: the verbs by name, in addition to those that are added.
    """

    def __init__(self, *args: Any, verbs: Mapping[str, LazyVerb], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        return sorted({*super().list_commands(ctx), *self._verbs})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb, imported on first use."""
        lazy = self._verbs.get(cmd_name)
        if lazy is not None and cmd_name not in self.commands:
            verb: click.Command = getattr(importlib.import_module(lazy.module), lazy.attribute)
            summarize(verb)
            self.add_command(verb, cmd_name)
        return super().get_command(ctx, cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The verbs that begin with a text, without an import, or the options."""
        verbs = [
            CompletionItem(name, help=self._verbs[name].summary if name in self._verbs else None)
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of verbs."""
        rows = []
        for name in self.list_commands(ctx):
            lazy = self._verbs.get(name)
            if lazy is not None:
                rows.append((name, lazy.summary))
            elif not self.commands[name].hidden:
                rows.append((name, self.commands[name].get_short_help_str(limit=formatter.width)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
