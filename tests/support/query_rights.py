"""Finds the named queries that a service can reach in its code, and the rights that PostgreSQL
requires for each query."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import penstock
from penstock.contracts.files import schemas_folder
from penstock.kafka.topology.services import SERVICES
from penstock.postgres.queries import load

ROOT = Path(penstock.__file__).parent

# Packages outside `penstock.postgres` whose statements a service executes.
_USES = {service.package: ("ingest",) for service in SERVICES.values() if service.ingests}

# Modules of the layer `submission` whose kinds a service uses.
_KINDS = {"gateway": ("tasks", "flows"), "task_sync": ("tasks",), "flow_owner": ("flows",)}

# PostgreSQL checks the rights of a trigger when it fires, not when the statement is planned.
BEHIND_TRIGGERS = {"task": {("backlog_change", "INSERT")}}


@cache
def all_queries() -> dict[str, str]:
    folder = schemas_folder() / "postgres" / "queries"
    return {
        f"{file.stem}.{name}": text
        for file in sorted(folder.glob("*.sql"))
        for name, (text, _parameters) in load(file.stem).items()
    }


# Cached, as `_mentions`: all services reach the same definitions of `penstock.postgres`.
@cache
def _named(node: ast.AST) -> set[str]:
    """The queries that constants below `node` name, in whole or up to a variable part."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text = part.value
            if text in all_queries():
                found.add(text)
            elif re.fullmatch(r"[a-z_]+\.([a-z]+_)?", text):
                found |= {name for name in all_queries() if name.startswith(text)}
    return found


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def _imported(file: Path) -> dict[str, tuple[str, str]]:
    """Returns module and name in `penstock.postgres` by the name that a file imports; the name
    of a module itself is ""."""
    found = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module == "penstock.postgres":
            found |= {name.asname or name.name: (name.name, "") for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock.postgres."):
            module = str(node.module).rpartition(".")[2]
            found |= {name.asname or name.name: (module, name.name) for name in node.names}
    return found


@cache
def _module(name: str) -> Path:
    return ROOT / "postgres" / f"{name}.py"


@cache
def _definitions(module: str) -> dict[str, ast.AST]:
    """Functions, constants and classes of a module: methods as `Class.method`, statements in the
    body of a class as `Class`."""
    found: dict[str, ast.AST] = {}
    for node in _tree(_module(module)).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found[node.name] = ast.Module(body=[], type_ignores=[])
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found[node.name if inner.name == "__init__" else f"{node.name}.{inner.name}"] = inner
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = node
    return found


@cache
def _methods(module: str) -> dict[str, list[str]]:
    """The methods of each class of a module."""
    found: dict[str, list[str]] = {}
    for definition in _definitions(module):
        name, dot, method = definition.partition(".")
        if dot:
            found.setdefault(name, []).append(method)
    return found


@cache
def _mentions(node: ast.AST, file: Path) -> tuple[set[tuple[str, str]], set[str]]:
    """The definitions of `penstock.postgres` that a piece of a file mentions, and all attributes
    that it uses."""
    imported = _imported(file)
    own = file.stem if file.parent == ROOT / "postgres" else None
    places, attributes = set(), set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            attributes.add(part.attr)
            if isinstance(part.value, ast.Name) and imported.get(part.value.id, ("", "-"))[1] == "":
                places.add((imported[part.value.id][0], part.attr))
        elif isinstance(part, ast.Name) and imported.get(part.id, ("", ""))[1]:
            places.add(imported[part.id])
        elif isinstance(part, ast.Name) and own:
            places.add((own, part.id))
    return places, attributes


def reached(*files: Path) -> set[str]:
    """The queries that some modules can reach. Methods match by name alone, so the result may
    have too many queries and never too few."""
    queries: set[str] = set()
    places: set[tuple[str, str]] = set()
    attributes: set[str] = set()
    seen: set[tuple[str, str]] = set()

    def take(node: ast.AST, file: Path) -> None:
        queries.update(_named(node))
        more, asked = _mentions(node, file)
        places.update(more)
        attributes.update(asked)

    for file in files:
        take(_tree(file), file)
    while True:
        for module, name in list(places):
            for method in _methods(module).get(name, ()):
                if method in attributes:
                    places.add((module, f"{name}.{method}"))
        new = {place for place in places - seen if place[1] in _definitions(place[0])}
        if not new:
            return queries
        seen |= new
        for module, name in new:
            take(_definitions(module)[name], _module(module))


def of_package(name: str) -> set[str]:
    """The queries that a service can reach."""
    return reached(
        *(file for part in (name, *_USES.get(name, ())) for file in sorted((ROOT / part).glob("*.py"))),
        *(ROOT / "submission" / f"{kind}.py" for kind in _KINDS.get(name, ())),
    )


# Tries each right on each table of a statement; keeps those without which PostgreSQL refuses it.
PROBE = """
CREATE FUNCTION pg_temp.needs(statement text, things text[]) RETURNS TABLE (thing text, privilege text) LANGUAGE plpgsql AS $$
DECLARE
    one text;
    other text;
    refused boolean;
BEGIN
    FOREACH one IN ARRAY things LOOP
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON penstock.%I TO penstock_probe', one);
    END LOOP;
    FOREACH one IN ARRAY things LOOP
        FOREACH other IN ARRAY ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] LOOP
            refused := false;
            BEGIN
                EXECUTE format('REVOKE %s ON penstock.%I FROM penstock_probe', other, one);
                SET LOCAL ROLE penstock_probe;
                EXECUTE 'EXPLAIN (GENERIC_PLAN) ' || statement;
                RAISE EXCEPTION 'as it was' USING ERRCODE = 'ZZ000';
            EXCEPTION
                WHEN insufficient_privilege THEN refused := true;
                WHEN SQLSTATE 'ZZ000' THEN NULL;
            END;
            IF refused THEN
                thing := one;
                privilege := other;
                RETURN NEXT;
            END IF;
        END LOOP;
    END LOOP;
    FOREACH one IN ARRAY things LOOP
        EXECUTE format('REVOKE ALL ON penstock.%I FROM penstock_probe', one);
    END LOOP;
END $$
"""


async def needs(connection: object, names: set[str]) -> set[tuple[str, str]]:
    """The rights that queries need, as (table or FUNCTION name(arguments), privilege).

    It needs a superuser's `connection`, creates a role to try them, and rolls everything back.
    """
    tables = {
        row["name"]
        for row in await connection.fetch(
            "SELECT relname AS name FROM pg_class WHERE relnamespace = 'penstock'::regnamespace"
            " AND relkind IN ('r', 'p') AND NOT relispartition"
        )
    }
    functions = {
        row["name"]: row["signature"]
        for row in await connection.fetch(
            "SELECT proname AS name, proname || '(' || pg_get_function_identity_arguments(oid) || ')' AS signature"
            " FROM pg_proc WHERE pronamespace = 'penstock'::regnamespace"
            " AND proacl IS NOT NULL"
        )
    }
    found: set[tuple[str, str]] = set()
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute("CREATE ROLE penstock_probe")
        await connection.execute("GRANT USAGE ON SCHEMA penstock TO penstock_probe")
        for signature in functions.values():
            await connection.execute(f"GRANT EXECUTE ON FUNCTION penstock.{signature} TO penstock_probe")
        await connection.execute(PROBE)
        for name in sorted(names):
            text = re.sub(r"(?m)(^|\s)--\s.*$", "", all_queries()[name]).rstrip().rstrip(";")
            words = set(re.findall(r"\w+", text))
            for row in await connection.fetch(
                "SELECT * FROM pg_temp.needs($1, $2)", text, sorted(tables & words)
            ):
                found.add((row["thing"], row["privilege"]))
                if row["privilege"] != "SELECT":
                    found |= BEHIND_TRIGGERS.get(row["thing"], set())
            found |= {("FUNCTION " + functions[word], "EXECUTE") for word in words & set(functions)}
    finally:
        await transaction.rollback()
    return found
