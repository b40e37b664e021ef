"""Flows beside plain tasks and beside other systems: `python -m benchmarks.flows`."""
