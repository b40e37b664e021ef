"""Makes each event take effect once, although it may be delivered more than once.

The id of the event and its effect are written in one transaction, so a crash leaves both or
neither. The example uses SQLite; in your application it is the database of your effects.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Self


class Effects:
    """A table with one row per processed event.

    Args:
        file: the database; created when missing.
    """

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file)
        with self._database:
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS effect (id TEXT PRIMARY KEY, what TEXT NOT NULL)"
            )

    def once(self, event_id: str, event: dict[str, Any]) -> bool:
        """Processes an event; returns False when it was processed before.

        Args:
            event_id: the event's `id`, or a callback's `webhook-id`; the same in every repetition.
            event: as of event.schema.json.
        """
        what = f"task {event['task']['id']}: {event['event']}"
        with self._database:
            row = self._database.execute(
                "INSERT INTO effect (id, what) VALUES (?, ?) ON CONFLICT DO NOTHING RETURNING id",
                (event_id, what),
            ).fetchone()
        return row is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
