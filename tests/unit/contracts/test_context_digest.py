"""Digests of contexts, by which submissions with one idempotency key are compared."""

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.contracts.context_digest import digest_of, with_digest
from penstock.contracts.submission import Submission

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=4),
    max_leaves=10,
)


def shuffled(value, chance):
    if isinstance(value, dict):
        items = [(name, shuffled(inner, chance)) for name, inner in value.items()]
        chance.shuffle(items)
        return dict(items)
    return [shuffled(inner, chance) for inner in value] if isinstance(value, list) else value


@given(JSON, st.integers())
def test_the_order_of_members_and_blanks_make_no_difference(value, seed):
    """T5: two producers may write the same context differently."""
    other = json.dumps(shuffled(value, random.Random(seed)), indent=2).encode()
    assert digest_of(Context(ContentType.JSON, other)) == digest_of(Context.encode(value))


@given(JSON, JSON)
def test_other_values_have_other_digests(one, other):
    """T5: also those that Python calls equal, such as 1 and true."""
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (digest_of(Context.encode(one)) == digest_of(Context.encode(other))) == same


def test_kinds_of_contexts_differ():
    """T5: a text is not the URL, the bytes or the JSON of the same characters."""
    ref = ObjectRef.of(b"x://y")
    found = {
        digest_of(Context(ContentType.TEXT, b"x://y")),
        digest_of(Context(ContentType.URL, b"x://y")),
        digest_of(Context(ContentType.BYTES, b"x://y")),
        digest_of(Context.encode("x://y")),
        digest_of(Context(ContentType.JSON, None, ref)),
    }
    assert len(found) >= 4
    assert digest_of(Context(ContentType.JSON, None, ref)) == digest_of(Context(ContentType.JSON, None, ref))


def test_only_submissions_with_a_key_have_a_digest():
    """Without a key nothing is compared, and no byte is stored."""
    context = Context.encode({"a": 1})
    assert with_digest(Submission(type="t", context=context)).context_digest is None
    made = with_digest(Submission(type="t", context=context, idempotency_key="k"))
    assert made.context_digest == digest_of(context)
    assert len(made.context_digest) == 16
