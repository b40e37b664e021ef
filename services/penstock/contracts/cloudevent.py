"""Events in the envelope of CloudEvents 1.0, in its JSON format (structured mode).

Source: https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md
"""

from __future__ import annotations

from datetime import UTC

import orjson

from penstock.contracts.event import Event

CONTENT_TYPE = "application/cloudevents+json"

# CloudEvents asks for a prefix that names the organisation of an event type.
_TYPE_PREFIX = "penstock."


def envelope(event: Event, source: str) -> bytes:
    """The body of a callback in the format `cloudevents`.

    Args:
        event: becomes `data`, exactly as on the topic `events`.
        source: URI reference of the deployment; source and event id together are unique.
    """
    return orjson.dumps(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": source,
            "type": _TYPE_PREFIX + event.name,
            "subject": str(event.subject_id),
            "time": event.at.astimezone(UTC),
            "datacontenttype": "application/json",
            "data": orjson.Fragment(event.encode()),
        }
    )
