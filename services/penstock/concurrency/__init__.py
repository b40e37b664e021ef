"""Mechanisms that all services share: retry, micro-batching, stall detection, timeouts."""
