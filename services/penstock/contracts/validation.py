"""Validation by the JSON Schemas of `schemas/messages`; errors point at the field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import jsonschema_rs
import orjson

from penstock.contracts.files import schemas_folder
from penstock.core.redaction import BY_FORM
from penstock.errors import InvalidRecord

# Error messages have these words in place of a value that may be a secret.
_MASKED_VALUE = "the value"
# The end of a message about the size of a value, behind the value.
# Characters at each end of a message that are searched for secrets.
_SEARCHED_CHARS = 4_000
_SIZE = re.compile(r" has (?:more|less) than \d+ [a-z]+$")


@cache
def validator(name: str) -> jsonschema_rs.Draft202012Validator:
    """The compiled validator of `schemas/messages/<name>.schema.json`."""
    return _compiled(name, None)


@cache
def _compiled(name: str, mask: str | None) -> jsonschema_rs.Draft202012Validator:
    schema = orjson.loads((schemas_folder() / "messages" / f"{name}.schema.json").read_bytes())
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True, mask=mask)


def conform(document: Any, name: str) -> None:
    """Checks a document against a schema.

    Raises:
        InvalidRecord: the first fault, with a JSON Pointer to it.
    """
    if not is_valid(document, name):
        raise problems(document, name)[0]


def is_valid(document: Any, name: str) -> bool:
    """Whether a document conforms to a schema; False when it is nested too deep to be checked."""
    try:
        return validator(name).is_valid(document)
    except ValueError:
        return False


def problems(document: Any, name: str) -> list[InvalidRecord]:
    """All faults of a document, each with a JSON Pointer; none when it conforms."""
    try:
        errors = _intended(validator(name).iter_errors(document))
        # The same errors in the same order. Their messages quote no value, so answers and logs may
        # have them.
        masked_errors = _intended(_compiled(name, _MASKED_VALUE).iter_errors(document))
    except ValueError as error:
        return [InvalidRecord(f"cannot be checked: {error}; flatten the document")]
    return [
        _fault(masked if _may_be_secret(error) else error)
        for error, masked in zip(errors, masked_errors, strict=True)
    ]


def faults(schema: jsonschema_rs.Draft202012Validator, document: Any) -> list[InvalidRecord]:
    """All faults of a document that has no secrets, each with a JSON Pointer."""
    return [_fault(error) for error in _intended(schema.iter_errors(document))]


def _intended(errors: Iterable[jsonschema_rs.ValidationError]) -> Iterator[jsonschema_rs.ValidationError]:
    """Replaces an error "none of the forms fits" (oneOf) by the errors of the intended form.

    The intended form is the only one whose type fits. Without such a form the error stays.
    """
    for error in errors:
        if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.OneOfNotValid):
            fitting = [
                form
                for form in error.kind.context
                if not any(
                    isinstance(e.kind, jsonschema_rs.ValidationErrorKind.Type)
                    and e.instance_path == error.instance_path
                    for e in form
                )
            ]
            if len(fitting) == 1:
                yield from _intended(fitting[0])
                continue
        yield error


def _may_be_secret(error: jsonschema_rs.ValidationError) -> bool:
    """Whether a message may quote the value of a callback's header."""
    value = error.instance
    return (
        "headers" in error.instance_path
        or isinstance(value, dict | list)
        # The string may be an object that was encoded twice.
        or (isinstance(value, str) and "headers" in value)
    )


def _fault(error: jsonschema_rs.ValidationError) -> InvalidRecord:
    return InvalidRecord(
        _shorten(_reason(error)), pointer="".join(f"/{_escape(part)}" for part in error.instance_path)
    )


def _reason(error: jsonschema_rs.ValidationError) -> str:
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Enum) and isinstance(error.instance, str):
        # The library names two choices and only counts the others. A user who mistyped one needs
        # all of them.
        choices = ", ".join(orjson.dumps(choice).decode() for choice in error.kind.options)
        return f"{orjson.dumps(error.instance).decode()} is not one of {choices}"
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.OneOfNotValid):
        kinds = [e.kind for form in error.kind.context for e in form]
        types = [kind.types for kind in kinds if isinstance(kind, jsonschema_rs.ValidationErrorKind.Type)]
        if len(types) == len(kinds):
            value, _, _ = error.message.partition(" is not valid under any")
            return f"{value} is neither {' nor '.join(name for names in types for name in names)}"
    if isinstance(error.instance, dict | list):
        # Otherwise the message begins with the whole value.
        size = _SIZE.search(error.message)
        if size is not None:
            return f"the {'object' if isinstance(error.instance, dict) else 'array'}{size[0]}"
    return error.message


def _escape(part: str | int) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def _shorten(message: str) -> str:
    # A message may quote the whole value, and answers and logs must stay short. The cuts could
    # divide a secret.
    if len(message) <= 300:
        return message
    if len(message) > 2 * _SEARCHED_CHARS:
        message = message[:_SEARCHED_CHARS] + message[-_SEARCHED_CHARS:]
    message = BY_FORM.text(message)
    return f"{message[:200]} … {message[-80:]}"
