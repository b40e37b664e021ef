"""Expressions in CEL, the Common Expression Language, by Google's own implementation.

`compile_expression` is the only way to an expression, and `Expression.evaluate` the only way to
its value. The library's types and messages do not leave this package
([decision 045](../../../docs/decisions/045-expressions-in-cel.md)).

An expression is bounded before it runs, so that it never hangs the flow that it belongs to:

- its text has at most `MAX_CHARACTERS` characters, and nests at most 32 levels;
- its comprehensions run through at most 10,000 elements together;
- `bounds` estimates its largest value and its work from its syntax tree and from the data at hand.

When in doubt, it refuses: what might be too large is an error, although it might have been small.
"""

from penstock.cel.expression import MAX_CHARACTERS, Expression, compile_expression
from penstock.cel.syntax import Path

__all__ = ["MAX_CHARACTERS", "Expression", "Path", "compile_expression"]
