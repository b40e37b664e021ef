"""Events in the envelope of CloudEvents 1.0, as its JSON format has them (structured mode): for targets that speak it.

Source: https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md
"""

from __future__ import annotations

from datetime import UTC

import orjson

from penstock.contracts.event import Event

CONTENT_TYPE = "application/cloudevents+json"

# In front of an event's own name: types are reverse-domain or at least somebody's.
_TYPE_PREFIX = "penstock."


def envelope(event: Event, source: str) -> bytes:
    """The body of a callback in this format.

    Args:
        event: becomes `data`, to the byte what it is on the topic `events`.
        source: where events come from, a URI reference; together with their id it is unique.
    """
    return orjson.dumps(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": source,
            "type": _TYPE_PREFIX + event.name,
            "subject": str(event.task["id"]),
            "time": event.at.astimezone(UTC),
            "datacontenttype": "application/json",
            "data": orjson.Fragment(event.encode()),
        }
    )
