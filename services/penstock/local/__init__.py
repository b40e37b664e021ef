"""The embedded default: a real Kafka, a real PostgreSQL and every service, on this machine, from Python packages.

Guarantees: everything it starts listens on loopback only; stops with it, even when it is killed with SIGKILL
(see `reaper`); and keeps its data between runs. One data directory has one owner at a time.
In doubt it refuses to start and says what is missing: a deployment that is half there would only confuse.

Meant for development, demonstrations, tests and benchmarks. In production the same services are pointed at clusters
that exist, and a container platform supervises them.
"""
