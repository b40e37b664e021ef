"""Methods of `Client` that upload flow definitions, start flows and send events to them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import orjson

from penstock.client.arguments import priority_name
from penstock.client.batches import submit_all
from penstock.client.checked import require_fields
from penstock.client.models import Submitted
from penstock.client.transport import Document, Transport, pages, without_none
from penstock.contracts.context import Context
from penstock.core.task import Priority
from penstock.errors import InvalidRecord

# The gateway's limit.
_PAGE_SIZE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowDraft:
    """A flow to start.

    Attributes:
        flow: name of its definition.
        inputs: a JSON value for each declared input, by name; those with a default may be missing.
        version: of the definition; None is the newest one.
        priority: order of release of its tasks, among all flows.
        idempotency_key: a second submission with the same flow and key returns the first flow.
        callbacks: targets of the flow's callbacks: URLs, or objects as in
            `flows-submitted.schema.json`.
        events: the transitions that are published, "final" or "all"; None is "final".
        labels: free names and values, for finding the flow again.
    """

    flow: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    version: int | None = None
    priority: Priority | str = Priority.MEDIUM
    idempotency_key: str | None = None
    # Not in the repr, because headers are secrets.
    callbacks: Sequence[str | Mapping[str, Any]] = field(default=(), repr=False)
    events: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of `flows-submitted.schema.json`.

        Raises:
            InvalidRecord: the inputs are not JSON.
        """
        require_fields(self)
        wire = without_none(
            flow=self.flow,
            version=self.version,
            idempotency_key=self.idempotency_key,
            events=self.events,
            inputs=_json(dict(self.inputs), "inputs") if self.inputs else None,
            callbacks=list(self.callbacks) or None,
            labels=dict(self.labels) or None,
        )
        if self.priority is not Priority.MEDIUM:
            wire["priority"] = priority_name(self.priority)
        return wire


class _Submitter(Transport, Protocol):
    """The parts of `Client` that these methods use."""

    _patience_s: float
    _read_output: Callable[..., Any]

    def _with_idempotency_key(self, draft: Any) -> tuple[dict[str, Any], bool]: ...


class FlowSubmissionMethods:
    """The methods of `Client` about definitions, starts and events of flows."""

    async def put_flow_definition(self: Transport, definition: Mapping[str, Any]) -> Document:
        """Uploads a version of a flow definition, and returns it as it is stored.

        A version never changes. Uploading the same content again is safe.

        Args:
            definition: `penstock.flows.Flow.definition()`, or the content of a file.

        Raises:
            Invalid: the definition has faults; each has a pointer.
            Conflict: the version exists with another content.
        """
        return await self._request("POST", "/flow-definitions", orjson.dumps(definition))

    async def flow_definitions(self: Transport) -> AsyncIterator[Document]:
        """Flow definitions by name: the newest version of each, and the number of its versions."""
        async for document in pages(self, "/flow-definitions", "definitions", (), None, _PAGE_SIZE):
            yield document

    async def flow_versions(
        self: Transport, name: str, *, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """Versions of a flow definition, newest first, without their content.

        Raises:
            NotFound: there is no definition with this name.
        """
        path = f"/flow-definitions/{quote(name, safe='')}"
        async for document in pages(self, path, "versions", (), limit, _PAGE_SIZE):
            yield document

    async def flow_definition(self: Transport, name: str, version: int) -> Document:
        """One version of a flow definition, with its content in `definition`.

        Raises:
            NotFound: there is no such version.
        """
        return await self._request("GET", f"/flow-definitions/{quote(name, safe='')}/versions/{version}")

    async def submit_flow(
        self: _Submitter,
        flow: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        priority: Priority | str = Priority.MEDIUM,
        idempotency_key: str | None = None,
        callbacks: Sequence[str | Mapping[str, Any]] = (),
        events: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Submitted:
        """Starts one flow; `FlowDraft` documents the arguments.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
        """
        draft = FlowDraft(
            flow=flow,
            inputs=inputs or {},
            version=version,
            priority=priority,
            idempotency_key=idempotency_key,
            callbacks=callbacks,
            events=events,
            labels=labels or {},
        )
        wire, generated = self._with_idempotency_key(draft)
        answer = await self._request("POST", "/flows", orjson.dumps(wire), safe="idempotency_key" in wire)
        return Submitted(answer["id"], created=generated or answer["created"], read_result=self._read_output)

    async def submit_flows(
        self: _Submitter,
        drafts: Iterable[FlowDraft | Mapping[str, Any]],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Submitted]:
        """Starts any number of flows, as `submit_many` submits tasks.

        Args:
            drafts: `FlowDraft`s, or JSON objects of `flows-submitted.schema.json`.
            progress: called after each request with the number of its drafts.

        Returns:
            The flows in the order of `drafts`.

        Raises:
            Invalid: none is submitted.
            SubmissionsRefused: some are refused, or wait for the object store, and all others are
                submitted. The pointer of each fault begins with the position in `drafts`.
        """
        return await submit_all(
            self, "flows", drafts, self._with_idempotency_key, self._patience_s, progress, self._read_output
        )

    async def send_event(
        self: Transport,
        name: str,
        data: Any = None,
        *,
        key: str = "",
        id: str | None = None,  # noqa: A002 (the platform's word for it)
    ) -> bool:
        """Sends an event to the flows that wait for it, now or within 24 hours.

        Args:
            name: of the event; the part before the first `--` is its namespace.
            data: any JSON value: the output of the nodes that wait.
            key: the key of the waits.
            id: an event whose id the namespace has already has no effect; None is a random one.

        Returns:
            Whether the event is new.

        Raises:
            Invalid: the event is refused; `pointer` is the field at fault.
        """
        generated = id is None
        event = {"id": f"auto-{uuid.uuid4().hex}" if generated else id, "key": key}
        if data is not None:
            event["data"] = _json(data, "data")
        answer = await self._request("POST", f"/events/{quote(name, safe='')}", orjson.dumps(event))
        # No other call has a generated id, so a repeated request stored the event the first time.
        return generated or bool(answer["created"])


def _json(value: Any, field_name: str) -> Any:
    """The value, once it is known that JSON can express it.

    Raises:
        InvalidRecord: it cannot.
    """
    if isinstance(value, bytes | bytearray | Context):
        raise InvalidRecord("not JSON: pass JSON values", pointer=f"/{field_name}")
    try:
        return orjson.Fragment(Context.encode(value).data or b"null")
    except InvalidRecord as error:
        raise InvalidRecord(
            error.reason.replace("the context", "the value"), pointer=f"/{field_name}"
        ) from error
