"""Expressions: their values, their errors with places, and hostile ones."""

import copy
import math
import re

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from penstock.cel import MAX_CHARACTERS, compile_expression
from penstock.cel.bounds import MAX_SIZE, MAX_STEPS, Estimate, measure
from penstock.cel.syntax import parse_tree
from penstock.cel.wire import Message
from penstock.errors import InvalidExpression


def evaluate(text, **data):
    return compile_expression(text, frozenset(data)).evaluate(data)


def refused(text, **data):
    with pytest.raises(InvalidExpression) as caught:
        evaluate(text, **data)
    return caught.value


@pytest.mark.parametrize(
    ("text", "data", "value"),
    [
        ("a.b", {"a": {"b": 1}}, 1),
        ('a["b-c"]', {"a": {"b-c": 1}}, 1),
        ("[1, 2].map(x, x * 2)", {}, [2, 4]),
        ("a.filter(x, x.n > 1).map(x, x.n)", {"a": [{"n": 1}, {"n": 2}]}, [2]),
        ('{"x": a, "y": [1, 2.5, null, true]}', {"a": "z"}, {"x": "z", "y": [1, 2.5, None, True]}),
        ('timestamp("2026-03-29T02:30:00+02:00")', {}, "2026-03-29T00:30:00Z"),
        ("size(a)", {"a": "äö"}, 2),
        ("-7 % 2", {}, -1),
        ("has(a.b) ? a.b : 7", {"a": {}}, 7),
        ("a.exists(x, x > 1) || true", {"a": ["text"]}, True),
    ],
)
def test_values(text, data, value):
    """Values are JSON."""
    assert evaluate(text, **data) == value


@pytest.mark.parametrize("number", [-(2**63), -1, 0, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_integers_keep_all_64_bits(number):
    """An integer of a context passes exactly, as it does everywhere else in the platform."""
    assert evaluate("a.b", a={"b": number}) == number
    assert evaluate("{'x': [a]}", a=number) == {"x": [number]}


def test_arithmetic_does_not_wrap():
    """Beyond 64 bits an integer is an error, and never another number."""
    for text in ("a + 1", "a * 2", "-(-a - 1)"):
        assert "overflow" in refused(text, a=2**63 - 1).reason
    assert "divide by zero" in refused("1 / a", a=0).reason
    assert refused("9223372036854775808").column == 1


def test_integers_and_doubles_are_equal_by_value_and_not_mixed_in_arithmetic():
    """JSON does not distinguish 1 and 1.0, and so comparisons do not; arithmetic wants int() or
    double()."""
    assert evaluate("a == 1 && a < 2 && a in [1]", a=1.0) is True
    error = refused("a + 1", a=1.5)
    assert "no operation + for (double, int64): convert" in error.reason
    assert (error.line, error.column) == (1, 3)
    assert evaluate("int(a) + 1", a=1.5) == 2


def test_null_is_a_value_and_a_missing_field_is_an_error():
    """A field that is null is there."""
    assert evaluate("a.b == null && has(a.b)", a={"b": None}) is True
    assert evaluate("has(a.c)", a={"b": None}) is False
    error = refused("a.b == null ||\n  a.c > 1", a={"b": 1})
    assert error.reason == "there is no field 'c': test it with has()"
    assert (error.line, error.column) == (2, 4)


def test_a_place_is_named_only_if_it_is_certain():
    """The library does not tell where an evaluation failed."""
    assert refused("a.c + a.b.c", a={"b": {"c": 1}}).line == 0


@pytest.mark.parametrize(
    ("text", "words", "column"),
    [
        ("1 +", "Syntax error", 4),
        ("", "Syntax error", 1),
        ("nope + 1", "undeclared reference to 'nope'", 1),
        ("1 + unknown(2)", "undeclared reference to 'unknown'", 12),
        ("'a' + 1", "no matching overload", 5),
        ("a.?b", "unsupported syntax", 1),
        ("'a\0'", "NUL", 0),
        ("'\ud800'", "surrogate", 0),
        ("'" + "x" * MAX_CHARACTERS + "'", "4,096 is the limit", 0),
        ("(" * 40 + "1" + ")" * 40, "nested deeper than 32 levels", 0),
        ("[" * 3000, "nested deeper than 32 levels", 0),
        ("a.all(b, b.all(c, c.all(d, d.all(e, e.all(f, true)))))", "4 comprehensions", 0),
    ],
)
def test_errors_of_the_text_have_their_place(text, words, column):
    """A fault is known before any flow runs."""
    with pytest.raises(InvalidExpression, match=words) as caught:
        compile_expression(text, frozenset({"a"}))
    assert caught.value.column == column
    assert len(str(caught.value)) < 2_500


def test_a_wrong_type_that_the_library_finds_late_is_refused():
    """The type of the whole value has a key that no map can have."""
    with pytest.raises(InvalidExpression) as caught:
        compile_expression("[].filter(x, x[1.5])", frozenset({"a"}))
    assert caught.value.reason == "Unsupported map key type: DOUBLE"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1.0 / 0.0", "inf"),
        ("b'x'", "bytes"),
        ("duration('1h')", "a duration"),
        ("type(1)", "a type"),
        ("{1: 2}", "the key 1"),
        ("1 ? 2 : 3", "no matching overload"),
        ("a ? 2 : 3", "neither true nor false"),
        ("a.b.c", "SELECT"),
    ],
)
def test_values_that_are_not_json_are_errors(text, words):
    """Nothing is converted silently."""
    assert words in refused(text, a={"b": 1}).reason


def test_paths_are_what_an_expression_reads():
    """Variables of comprehensions are none of them."""
    text = 'nodes.a.output.map(x, x.n + nodes["b"].output[inputs.i])'
    found = compile_expression(text, frozenset({"nodes", "inputs"})).paths
    assert [(path.names, path.at) for path in found] == [
        (("nodes", "a", "output"), 0),
        (("nodes", "b", "output"), 28),
        (("inputs", "i"), 46),
    ]
    shadowed = compile_expression("[1].map(nodes, nodes + 1)", frozenset({"nodes"}))
    assert shadowed.paths == ()


@pytest.mark.parametrize(
    ("text", "sized"),
    [
        ("size(a.b) + size(a.c) + a.d.size()", {("a", "b"), ("a", "c"), ("a", "d")}),
        ("size(a.b) > 0 && a.b[0] == 1", set()),
        ("size(a.b) > 0 && a.b.c == 1", set()),
        ("size(a.b) > 0 && size(a) == 1", set()),
        ("has(a.b) && size(a.b) > 0", set()),
        ("[[1]].map(a, size(a))", set()),
        ("size(a) > 0 && [[1]].map(a, size(a)) == []", set()),
        ("size(a.b.map(x, x)) > 0", set()),
    ],
)
def test_paths_of_which_only_the_size_is_read(text, sized):
    """A long list of results is not read for its size."""
    assert compile_expression(text, frozenset({"a"})).sizes == sized


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("a", "DYN"),
        ("a == 1", "BOOL"),
        ("[a]", "LIST"),
        ("{'x': a}", "MAP"),
        ("'x'", "STRING"),
        ("1u", "UINT"),
    ],
)
def test_types_are_known_as_far_as_they_are_certain(text, type_):
    """Validation can refuse a condition that is a number."""
    assert compile_expression(text, frozenset({"a"})).type == type_


LONG = list(range(100_000))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.all(x, x >= 0)", "10,000 steps"),
        ("a.map(x, x)", "steps"),
        ("a.map(x, a)", "values and characters"),
        ("b.map(x, b.map(y, b.map(z, z)))", "values and characters"),
        ("b.all(x, a == a)", "steps"),
        ("b.all(x, x in a)", "steps"),
        ("s + s + s + s", "values and characters"),
        ("[" + ", ".join(["a"] * 30) + "]", "values and characters"),
        (
            "{'x': [a, a, a, a, a, a, a], 'y': [a, a, a, a, a, a, a], 'z': [a, a, a, a, a, a, a]}",
            "values and characters",
        ),
        ("b.exists(x, s.matches('(x+x+)+y'))", "steps"),
        ("['x']" + ".map(a, a + a + a + a + a + a + a + a)" * 9, "values and characters"),
        ("[1]" + ".map(a, [a, a, a, a, a, a, a, a, a])" * 9, "values and characters"),
        ("[[1]]" + ".map(a, a + a + a + a + a + a + a + a)" * 9, "values and characters"),
        ("['x']" + ".map(a, {'p': a, 'q': a, 'r': a, 's': [a, a, a]})" * 9, "values and characters"),
    ],
)
def test_hostile_expressions_are_refused(text, words):
    """An expression that would fill the memory, or run for minutes, ends with an error at once."""
    assert words in refused(text, a=LONG, b=LONG[:5_000], s="x" * 600_000).reason


def test_long_lists_can_be_passed_on():
    """A list of 100,000 items is selected, counted and compared without a comprehension."""
    assert evaluate("a.b", a={"b": LONG}) == LONG
    assert evaluate("size(a.b) > 7 && a.b[5] == 5", a={"b": LONG}) is True


def test_usual_operations_on_lists_are_allowed():
    """The bounds leave room for lists of a few thousand objects."""
    files = [{"name": f"file-{n}", "size": n, "tags": ["a", "b"]} for n in range(3_000)]
    assert len(evaluate("f.filter(x, x.size > 5)", f=files)) == 2_994
    assert len(evaluate("f.map(x, {'n': x.name, 's': x.size + 1})", f=files)) == 3_000
    assert evaluate("f.all(x, x.tags.exists(t, t == 'a'))", f=files) is True


def test_a_bound_does_not_count_data_that_is_not_read():
    """A long list in another node does not make an expression expensive."""
    assert evaluate("a.short.map(x, x + 1)", a={"short": [1, 2], "long": LONG}) == [2, 3]


names = st.sampled_from(["a", "b", "s", "n", "x", "y", "missing"])
numbers = st.sampled_from(["0", "1", "-1", "9223372036854775807", "1.5", "2u"])
texts = st.sampled_from(["''", "'x'", "'xyxyxyxy'", "null", "true", "[]", "{}", "[1, 2]", "{'k': [1]}"])


def grown(inner):
    return st.one_of(
        st.builds(
            "({} {} {})".format,
            inner,
            st.sampled_from(["+", "-", "*", "/", "%", "==", "<", "&&", "||", "in"]),
            inner,
        ),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("{{'k': {}, 'l': {}}}".format, inner, inner),
        st.builds("{}.map({}, {})".format, inner, st.sampled_from("xy"), inner),
        st.builds("{}.filter({}, {})".format, inner, st.sampled_from("xy"), inner),
        st.builds("{}.exists({}, {})".format, inner, st.sampled_from("xy"), inner),
        st.builds("({} ? {} : {})".format, inner, inner, inner),
        st.builds("{}.k".format, inner),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("string({})".format, inner),
        st.builds("size({})".format, inner),
        st.builds("!{}".format, inner),
    )


expressions = st.recursive(names | numbers | texts, grown, max_leaves=12)
DATA = {
    "a": [1, [2, 3], {"k": [4, 5, "long text"]}, None],
    "b": {"k": {"k": [1, 2, 3], "l": "xy"}, "l": [[1, 2], [3]]},
    "s": "some text",
    "n": 3,
    "x": [[[1, 2], [3, 4]], [[5]]],
    "y": 2**64 - 1,
}


# Leaves and forms by type; `<list>` stands for an expression of that type, and `<any x>` for a body
# that also has the variable `x`.
FITTING = {
    "number": (
        ["0", "-1", "n", "9223372036854775806"],
        ["(<number> + <number>)", "(<number> * <number>)", "size(<list>)", "size(<text>)", "size(<map>)"],
    ),
    "truth": (
        ["true", "false", "n == 3"],
        ["(<any> == <any>)", "(<any> in <list>)", "!<truth>", "<list>.exists(x, <truth x>)"],
    ),
    "text": (
        ["''", "'xyxyxyxy'", "s", "b.k.l"],
        ["(<text> + <text>)", "string(<number>)", "string(<text>)", "(<truth> ? <text> : <text>)"],
    ),
    "list": (
        ["[]", "[1, 2]", "[[1, 2], [3]]", "['xyxyxyxy']", "a", "b.l", "x"],
        [
            "[<any>, <any>]",
            "(<list> + <list>)",
            "(<truth> ? <list> : <list>)",
            "<list>.map(x, <any x>)",
            "<list>.map(y, <any y>)",
            "<list>.filter(x, <truth x>)",
            "<list>.map(y, [y, y])",
        ],
    ),
    "map": (["{}", "{'k': [1]}", "b", "b.k"], ["{'k': <any>, 'l': <list>}", "(<truth> ? <map> : <map>)"]),
    "any": (
        ["null", "1.5", "y", "a[2].k", "b.k.k"],
        ["<number>", "<text>", "<list>", "<list>", "<map>", "<truth>", "<list>[0]", "{'k': <any>}.k"],
    ),
}


@st.composite
def fitting_expressions(draw):
    """Expressions of which most have a value: the operands have the types that they must have."""

    def grown(kind, depth, variables):
        leaves, forms = FITTING[kind]
        form = draw(st.sampled_from(forms if depth > 1 else forms + leaves if depth else leaves + variables))

        def part(found):
            more = [found["variable"]] if found["variable"] else []
            return grown(found["kind"], depth - 1 if kind != "any" else depth, variables + more)

        return re.sub(r"<(?P<kind>\w+) ?(?P<variable>\w?)>", part, form)

    return grown("any", 3, [])


@settings(max_examples=150, deadline=None)
@given(fitting_expressions())
def test_a_bound_is_never_below_the_value(text):
    """The estimate holds for every expression; else a hostile expression could pass it."""
    try:
        value = evaluate(text, **DATA)
    except InvalidExpression:
        reject()
    expression = compile_expression(text, frozenset(DATA))
    estimate = Estimate(DATA)
    bound = estimate.of(expression._tree, {})
    actual = measure(value)
    assert actual.size <= bound.size <= estimate.largest
    assert actual.count <= bound.count
    if isinstance(value, list | dict):
        assert actual.length <= bound.length


@settings(max_examples=100, deadline=None)
@given(fitting_expressions() | expressions)
def test_a_value_needs_only_the_data_that_is_read(text):
    """An evaluation converts what its paths name, so a long list beside it costs nothing."""

    def outcome(expression):
        try:
            return expression.evaluate(DATA)
        except InvalidExpression as error:
            return error.reason

    try:
        expression = compile_expression(text, frozenset(DATA))
    except InvalidExpression:
        reject()
    of_all = copy.copy(expression)
    of_all._read = None
    assert outcome(expression) == outcome(of_all)


def test_an_item_of_a_map_does_not_convert_the_list():
    """F3: `each` may read an input beside a list of any length, and beside the item."""
    expression = compile_expression("{'file': item, 'region': inputs.region}", frozenset({"item", "inputs"}))

    class Unread(dict):
        def __getitem__(self, name):
            assert name == "region"
            return super().__getitem__(name)

    found = expression.evaluate({"item": "a", "inputs": Unread(region="eu", files=LONG)})
    assert found == {"file": "a", "region": "eu"}


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=200) | st.text("()[]{}.,+-?:!'\"ax1 \n", max_size=400) | expressions)
def test_any_text_is_a_value_or_one_error(text):
    """Hostile text ends with a value of JSON or with `InvalidExpression`, and with nothing else."""
    value, error = None, None
    try:
        value = evaluate(text, **DATA)
    except InvalidExpression as caught:
        error = caught
    assert error is None or (error.reason and error.line <= text.count("\n") + 1)
    assert measure(value).size < MAX_SIZE
    assert not (isinstance(value, float) and not math.isfinite(value))


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_damaged_trees_are_refused(data):
    """A tree in an unknown form has no bounds, so it must not be evaluated."""
    with pytest.raises(ValueError, match=r"unknown node|is cut|wire type"):
        parse_tree(b"\x12" + bytes([len(data)]) + data)


def test_fields_of_fixed_length_are_read():
    """Literals of doubles have eight bytes."""
    double = b"\x00" * 6 + b"\xf8\x3f"
    assert Message.parse(b"\x09" + double).data(1) == double


def test_steps_of_comprehensions_are_counted_together():
    """The library itself ends an evaluation after so many steps."""
    rows = [LONG[:200]] * (MAX_STEPS // 200 + 1)
    assert "10,000 steps" in refused("a.all(x, x.all(y, y >= 0))", a=rows).reason
