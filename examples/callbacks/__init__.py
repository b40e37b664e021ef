"""Hearing what became of tasks: a consumer of the topic `events`, and a receiver of signed callbacks."""
