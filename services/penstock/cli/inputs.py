"""Reads the inputs of `penstock submit`: contexts, callbacks, and files with many tasks."""

from __future__ import annotations

import base64
import os
import sys
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import orjson

from penstock.errors import Faults, Invalid, InvalidRecord
from penstock.http.problems import relocated

# The end of the help texts of options that name targets.
CALLBACK_FORMS = (
    'The value is a URL, an object such as {"url": …, "events": "all"}, or @FILE with one of them. Put secret '
    "headers into a file. The option is repeatable."
)


def context_of(text: str, content_type: str) -> Any:
    """The wire value of `--context`, which is a text, `@file`, or `-` for standard input.

    Raises:
        InvalidRecord: the file cannot be read, or the value does not have its content type.
    """
    data = _bytes_of(text)
    if content_type == "json":
        return _json_of(data, "/context", "quote strings, or choose another --content-type")
    if content_type == "bytes":
        return base64.b64encode(data).decode()
    try:
        return data.removeprefix(BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"not UTF-8 ({error}); use --content-type bytes", pointer="/context") from error


def json_of(text: str, pointer: str) -> Any:
    """The JSON value of an option, which is a text, `@file`, or `-` for standard input.

    Args:
        text: value of the option.
        pointer: JSON Pointer to the field.

    Raises:
        InvalidRecord: the file cannot be read, or the value is not JSON.
    """
    return _json_of(_bytes_of(text, pointer), pointer, "quote strings")


def _json_of(data: bytes, pointer: str, hint: str) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:
        raise InvalidRecord(f"not JSON ({error}); {hint}", pointer=pointer) from error


def parse_json(data: bytes) -> Any:
    """The JSON value of a text in UTF-8, with or without the mark that editors put before it.

    Raises:
        ValueError: it is no JSON, or in another encoding.
    """
    data = data.removeprefix(BOM_UTF8)
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise ValueError("the text is UTF-16: save it as UTF-8")
    return orjson.loads(data)


def labels_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """The labels of `name=value` options.

    Raises:
        InvalidRecord: an option has no `=`, or no name.
    """
    labels = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRecord(f"--label {pair!r} has no name and value: write --label name=value")
        labels[name] = value
    return labels


def callbacks_of(texts: Sequence[str]) -> list[Any] | None:
    """The wire value of `--callback` options; None without options.

    Args:
        texts: values of the options.

    Raises:
        InvalidRecord: a file cannot be read, or an object is not JSON. The text does not quote it.
    """
    return [_callback_of(text, f"/callbacks/{index}") for index, text in enumerate(texts)] or None


def _callback_of(text: str, pointer: str) -> Any:
    data = _bytes_of(text, pointer) if text.startswith("@") else os.fsencode(text)
    data = data.removeprefix(BOM_UTF8).strip()
    if data.startswith(b"{"):
        return _json_of(data, pointer, "write a URL or an object")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRecord("not UTF-8: save the file as UTF-8", pointer=pointer) from error


def _bytes_of(text: str, pointer: str = "/context") -> bytes:
    if text == "-":
        return sys.stdin.buffer.read()
    if not text.startswith("@"):
        # The bytes as the shell gave them, in any locale.
        return os.fsencode(text)
    return read_input(text[1:], pointer)


def read_input(name: str, pointer: str = "") -> bytes:
    """The content of a file.

    Args:
        name: path of the file.
        pointer: JSON Pointer to the field that it is for.

    Raises:
        InvalidRecord: it cannot be read.
    """
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise InvalidRecord(f"cannot read {name}: {error.strerror}", pointer=pointer) from error
    except ValueError as error:
        # A NUL, or a character that the locale lacks.
        raise InvalidRecord(f"cannot read {name!r}: {error}", pointer=pointer) from error


@contextmanager
def naming_options(*, below: str = "") -> Iterator[None]:
    """Puts the option or argument of the running command in place of the pointer of an error.

    Args:
        below: the beginning of pointers that no option has, such as the position in a batch of one.

    Raises:
        Invalid: with the name of the option.
    """
    ctx = click.get_current_context()
    params = {param.name.strip("_"): param for param in ctx.command.params if param.name}

    def move(pointer: str) -> str:
        pointer = pointer.removeprefix(below)
        name, _, rest = pointer.removeprefix("/").partition("/")
        if (param := params.get(name)) is None:
            return pointer
        option = param.opts[0] if isinstance(param, click.Option) else param.make_metavar(ctx)
        return f"{option} (/{rest})" if rest else option

    try:
        yield
    except Invalid as error:
        raise relocated(error, move) from None


class Lines:
    """The tasks of a file with one JSON object a line; blank lines are skipped.

    Args:
        name: name of the file; `-` is standard input.
        defaults: fields of every line that does not have them.

    Raises:
        InvalidRecord: the file cannot be read, or has no task.
    """

    def __init__(self, name: str, defaults: Mapping[str, Any]) -> None:
        self._name = name
        self._defaults = defaults
        lines = (sys.stdin.buffer.read() if name == "-" else read_input(name)).splitlines()
        self._lines = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        if not self._lines:
            source = "standard input" if name == "-" else name
            raise InvalidRecord(f"{source} is empty: --file takes one JSON object a line, one for each task")

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, line in self._lines:
            try:
                raw = parse_json(line)
            except ValueError as error:
                raise InvalidRecord(f"{self._name}, line {number}: not JSON: {error}") from error
            if not isinstance(raw, dict):
                raise InvalidRecord(f"{self._name}, line {number}: not a JSON object")
            yield {**self._defaults, **raw}

    def located(self, error: Invalid) -> Invalid:
        """The error about a task of a request as an error about its line."""
        if isinstance(error, Faults):
            return Faults([self.located(fault) for fault in error.faults])
        position, _, rest = error.pointer.removeprefix("/").partition("/")
        if not position.isdigit():
            return error
        line = f"{self._name}, line {self._lines[int(position)][0]}"
        return InvalidRecord(f"{line}: {'/' + rest + ': ' if rest else ''}{error.reason}")
