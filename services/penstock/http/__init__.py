"""HTTP adapters on aiohttp: problem documents (RFC 9457), request bodies, query parameters."""
