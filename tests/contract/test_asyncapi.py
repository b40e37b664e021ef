"""schemas/messages/asyncapi.json: every topic is in it, and everything it refers to exists."""

import json

from penstock.contracts.files import schemas_folder
from penstock.kafka.topology.topics import PLATFORM, ready

MESSAGES = schemas_folder() / "messages"
DOCUMENT = json.loads((MESSAGES / "asyncapi.json").read_text())


def resolve(reference):
    node = DOCUMENT
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


def test_every_topic_is_described_and_no_other():
    """Contracts: AsyncAPI 3 over all records."""
    assert DOCUMENT["asyncapi"].startswith("3.")
    addresses = {channel["address"] for channel in DOCUMENT["channels"].values()}
    assert addresses == {topic.name for topic in PLATFORM} | {ready("{type}", 1).name}


def test_every_reference_leads_somewhere():
    """Operations lead to channels, channels to messages, messages to schema files, and each
    schema is used."""
    used = set()
    for operation in DOCUMENT["operations"].values():
        assert operation["action"] in ("send", "receive")
        channel = resolve(operation["channel"]["$ref"])
        for message in channel["messages"].values():
            content = resolve(message["$ref"])
            headers = content.get("headers", {"schema": {"properties": {}}})["schema"]["properties"]
            of_headers = [
                header["contentSchema"]["$ref"] for header in headers.values() if "contentSchema" in header
            ]
            for schema in (content["payload"]["schema"]["$ref"], *of_headers):
                assert (MESSAGES / schema).is_file(), schema
                used.add(schema.removeprefix("./"))
    # A task type is a row and a request body, and a child is a part of a result's context. Neither
    # is a record.
    others = {"task-type.schema.json", "child.schema.json"}
    assert used == {path.name for path in MESSAGES.glob("*.schema.json")} - others
