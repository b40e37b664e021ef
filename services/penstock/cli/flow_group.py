"""The group `penstock flows`, to which each module of flow verbs adds its own."""

from __future__ import annotations

import click

from penstock.cli.groups import Group


@click.group(cls=Group)
def flows() -> None:
    """Uploads, starts, shows and steers flows; validates, draws and simulates their definitions.

    A verb that steers changes one flow by its id, and many by ids or by a filter.
    """
