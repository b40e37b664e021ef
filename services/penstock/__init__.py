"""Penstock: asynchronous, multi-stage tasks on Kafka and PostgreSQL."""

__version__ = "0.1.0"
