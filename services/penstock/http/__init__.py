"""HTTP, by aiohttp: problem+json (RFC 9457) in both directions, and request bodies and queries with precise errors."""
