"""PostgreSQL, the truth, by asyncpg.

`schemas/postgres` has the SQL. `connection` translates errors of the driver.
"""
