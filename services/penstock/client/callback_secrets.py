"""Methods of `Client` about the secrets that sign callbacks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import orjson

from penstock.client.transport import Document, Transport, pages, query_of, without_none

PAGE_SIZE = 500


class CallbackSecretMethods:
    """The methods of `Client` about secrets; the API's description defines the documents."""

    async def callback_secrets(
        self: Transport, *, namespace: str | None = None, url: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """Secrets by namespace and URL, without the secrets themselves.

        Args:
            namespace: only this namespace; `*` is the deployment, None is every namespace that the
                API key may see.
            url: only secrets of the target with this URL.
            limit: most secrets; None is all.
        """
        query = query_of(namespace=namespace, url=url)
        async for secret in pages(self, "/targets/secrets", "secrets", query, limit, PAGE_SIZE):
            yield secret

    async def create_callback_secret(
        self: Transport,
        *,
        url: str | None = None,
        namespace: str | None = None,
        scheme: str = "v1",
        secret: str | None = None,
        reference: str | None = None,
        public_key: str | None = None,
        overlap_s: float | None = None,
    ) -> Document:
        """Creates a secret that signs the callbacks of a target, of a namespace or of all.

        Args:
            url: the target; None is every target of the namespace without a secret of its own.
            namespace: `*` is the deployment; None is the only namespace of the API key, or else
                `default`.
            scheme: `v1` is HMAC-SHA256, `v1a` is ed25519.
            secret: `whsec_…` or `whsk_…`; None generates one.
            reference: `env:NAME` or `file:NAME`, where the callbacks service finds the secret.
            public_key: `whpk_…`, of a `v1a` secret by reference.
            overlap_s: seconds for which the secrets that signed before sign too; None is none.

        Returns:
            The document, with the generated symmetric secret in `secret`. No later answer has it.

        Raises:
            Invalid: a field is wrong; `pointer` is the field.
            NotFound: there is no such namespace.
            Conflict: the gateway cannot encrypt, or there are too many secrets.
        """
        wire = without_none(
            url=url,
            namespace=namespace,
            scheme=scheme,
            secret=secret,
            reference=reference,
            public_key=public_key,
            overlap_s=overlap_s,
        )
        # A repetition would create another secret.
        return await self._request("POST", "/targets/secrets", orjson.dumps(wire), safe=False)

    async def rotate_callback_secret(
        self: Transport, /, secret_id: str, *, overlap_s: float = 86_400.0, **given: Any
    ) -> Document:
        """Replaces a secret; both sign until the overlap ends.

        Args:
            secret_id: id of the old secret.
            overlap_s: seconds for which the old secret signs too.
            given: `secret`, `reference` or `public_key`, as for `create_callback_secret`.

        Returns:
            The new secret, as `create_callback_secret` does, and the old one in `replaces`.

        Raises:
            NotFound: there is no such secret.
            Conflict: it was rotated before, or the gateway cannot encrypt.
        """
        wire: Mapping[str, Any] = {"overlap_s": overlap_s, **without_none(**given)}
        return await self._request("POST", f"{_path(secret_id)}/rotate", orjson.dumps(wire), safe=False)

    async def revoke_callback_secret(self: Transport, secret_id: str) -> Document:
        """Revokes a secret, and returns it; may be repeated.

        Raises:
            NotFound: there is no such secret.
        """
        return await self._request("DELETE", _path(secret_id))

    async def reencrypt_callback_secrets(self: Transport) -> Document:
        """Encrypts all stored secrets with the first of the gateway's encryption keys.

        Returns:
            `reencrypted`, the number of changed secrets, and the id of the `encryption_key`.

        Raises:
            Conflict: a secret cannot be decrypted.
        """
        return await self._request("POST", "/targets/secrets/reencrypt")

    async def public_keys(
        self: Transport, url: str | None = None, namespace: str | None = None
    ) -> list[Document]:
        """The ed25519 keys that verify callbacks to a target, the newest first.

        Args:
            url: the target; None is any target of the namespace without a secret of its own.
            namespace: of the task types that call it; None is `default`.
        """
        query = query_of(url=url, namespace=namespace)
        answer = await self._request("GET", "/targets/public-keys", query=query)
        return list(answer["keys"])


def _path(secret_id: str) -> str:
    return f"/targets/secrets/{quote(secret_id, safe='')}"
