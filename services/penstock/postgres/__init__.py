"""PostgreSQL, the truth, by asyncpg. SQL lives in `schemas/postgres`; drivers' errors are translated in `connection`."""
