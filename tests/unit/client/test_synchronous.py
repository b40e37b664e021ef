"""The blocking client."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.client import Draft, SyncClient
from penstock.errors import GatewayUnavailable


def test_an_exit_in_the_callers_own_code_ends_no_connection() -> None:
    """T5: drafts run on the client's thread. Their SystemExit reaches the caller of the method,
    and calls of other threads do not wait without end."""

    def drafts() -> Iterator[Draft]:
        sys.exit(3)
        yield

    raised: list[BaseException] = []

    def use(client: SyncClient) -> None:
        for call in (lambda: client.submit_many(drafts()), lambda: client.get(1)):
            with pytest.raises((SystemExit, GatewayUnavailable)) as error:
                call()
            raised.append(error.value)

    # No `with` block: its end would wait without end, too.
    client = SyncClient("http://127.0.0.1:1", patience_s=0).__enter__()
    thread = threading.Thread(target=use, args=(client,), daemon=True)
    thread.start()
    thread.join(20)
    assert [type(each) for each in raised] == [SystemExit, GatewayUnavailable]
    client.__exit__()
