"""The embedded deployment: Kafka, PostgreSQL and every service, from Python packages.

Guarantees: its processes listen on loopback only. They stop when the deployment ends, even after
SIGKILL (see `reaper`). Data is kept between runs, and a data directory has one owner at a time.

Fails closed: it refuses to start when a part is missing, and names the part.

It is meant for development, demonstrations, tests and benchmarks. In production the same services
use existing clusters, and a container platform supervises them.
"""
