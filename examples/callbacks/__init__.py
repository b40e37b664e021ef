"""Receiving outcomes: a consumer of the topic `events`, and a receiver of callbacks."""
