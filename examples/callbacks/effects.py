"""Doing something once for each event, although each may come more than once.

The id of what was told and what was done about it are written in one transaction: a crash leaves both or neither. Here
that is SQLite; in your application it is the database that your effects are in anyway.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Self


class Effects:
    """A table with one row for each event that was acted upon.

    Args:
        file: the database; created when missing.
    """

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file)
        with self._database:
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS effect (id TEXT PRIMARY KEY, what TEXT NOT NULL)"
            )

    def once(self, told_id: str, event: dict[str, Any]) -> bool:
        """Acts upon an event; False when that was done before.

        Args:
            told_id: the event's `id`, or a callback's `webhook-id`: the same whenever it is told again.
            event: as of event.schema.json.
        """
        what = f"task {event['task']['id']}: {event['event']}"
        with self._database:
            row = self._database.execute(
                "INSERT INTO effect (id, what) VALUES (?, ?) ON CONFLICT DO NOTHING RETURNING id",
                (told_id, what),
            ).fetchone()
        return row is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
