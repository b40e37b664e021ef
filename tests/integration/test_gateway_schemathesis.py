"""The gateway against its own description: what schemathesis makes up from it, authenticated and not."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.access import gateway_with_keys, make_key, sent

from penstock.core.access import Role
from penstock.gateway import openapi
from penstock.gateway.rules import RULES
from penstock.kafka.connection import create_topics
from penstock.kafka.topics import PLATFORM
from penstock.settings import Kafka

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# Of each operation, in each of two modes; PENSTOCK_LOAD=1 looks further.
EXAMPLES = 200 if os.environ.get("PENSTOCK_LOAD") else 6


def pointed(case: Any, task_id: int) -> None:
    """Lets a request that was made up be about things that are there."""
    if "id" in (case.path_parameters or {}) and case.path.startswith("/tasks/"):
        case.path_parameters["id"] = task_id
    if "name" in (case.path_parameters or {}):
        case.path_parameters["name"] = "acme--media"
    bodies = case.body if isinstance(case.body, list) else [case.body]
    for body in bodies:
        if isinstance(body, dict) and "type" in body:
            body["type"] = "acme--media"
        if isinstance(body, dict) and "ids" in body and not case.path.startswith("/callbacks"):
            body["ids"] = [task_id]


SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    # What fails is told as it is: making it smaller takes minutes.
    phases=[hypothesis.Phase.generate],
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def hammer(url: str, headers: dict[str, str], task_id: int, *, open_only: bool) -> int:
    """Asks all operations; how many requests that were.

    Raises:
        ExceptionGroup: what schemathesis says of each that was not answered as described.
    """
    asked = 0
    faults: list[Exception] = []
    schema = schemathesis.openapi.from_dict(openapi.document())
    # What is sent as credentials is said here.
    schema.config.generation.with_security_parameters = False
    with requests.Session() as session:

        def ask(case: Any, *, there: bool) -> None:
            nonlocal asked
            if there:
                pointed(case, task_id)
            if case.path == "/hold_task" and isinstance(case.body, dict):
                # A long poll would wait for what never comes.
                case.body["wait_s"] = 0
            asked += 1
            answer = case.call(base_url=url, headers=headers, session=session, timeout=60)
            case.validate_response(answer, checks=CHECKS)
            if open_only and RULES[case.operation.label].action is not None:
                # Beside the pattern of an id there is no route, for anybody.
                unrouted = answer.status_code == 404 and answer.json()["type"] == "about:blank"
                assert answer.status_code == 401 or unrouted, (case, answer.status_code)

        operations = [found.ok() for found in schema.get_all_operations()]
        for operation, mode in itertools.product(operations, GenerationMode):
            made = operation.as_strategy(generation_mode=mode)
            try:
                SETTINGS(hypothesis.given(case=made, there=strategies.booleans())(ask))()
            except hypothesis.errors.Unsatisfiable as error:
                # An operation without parameters or body cannot be asked wrongly.
                if mode is not GenerationMode.NEGATIVE:
                    faults.append(error)
            except Exception as error:  # noqa: BLE001 (all of them are told together)
                faults.append(error)
    if faults:
        raise ExceptionGroup(f"{len(faults)} operations are not answered as described", faults)
    return asked


# Seen is the jitter of the gateway, which runs in another thread of this process.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("authenticated", [True, False])
async def test_every_answer_is_one_that_the_description_promises(
    authenticated, kafka_servers, prefix, database, tmp_path
):
    """O5, issue 7: to whatever is made up from the description, right and wrong, about what is there and what is not, the
    gateway gives an answer that it describes, and never a 5xx; without a key nothing but 401, save for what is open."""
    # What cancelling owes is published: without its topic a stop would wait for it in vain.
    await create_topics(Kafka(kafka=kafka_servers, prefix=prefix), PLATFORM)
    _, token = await make_key(database, Role.ADMIN)
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:
        assert (await caller.post("/types", {"name": "acme--media"}, headers=sent(token))).status == 201
        task = await caller.post("/tasks", {"type": "acme--media", "context": 1}, headers=sent(token))
        asked = await asyncio.to_thread(
            hammer,
            caller.url,
            sent(token) if authenticated else {},
            task.body["id"],
            open_only=not authenticated,
        )
        assert asked > 100
