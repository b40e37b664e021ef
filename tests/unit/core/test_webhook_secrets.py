"""The form of secrets and references, and the scopes of a target."""

import base64
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.target import TargetId
from penstock.core.webhook_secrets import (
    PRIVATE_PREFIX,
    PUBLIC_PREFIX,
    SYMMETRIC_PREFIX,
    Scheme,
    Scope,
    encode,
    parse_reference,
    private_key_bytes,
    public_key_bytes,
    scopes_of,
    secret_problem,
    secrets_in,
)


def test_scopes_are_from_the_narrowest_to_the_widest():
    """C7: a target's own secrets come first, then its namespace's, then the deployment's."""
    assert scopes_of(TargetId("shop", "https://a.example/x")) == (
        Scope("shop", "https://a.example/x"),
        Scope("shop", ""),
        Scope("*", ""),
    )


@given(st.binary(max_size=80))
def test_a_symmetric_secret_has_24_to_64_bytes(value):
    """C7: a secret that the convention forbids is refused, and not shown."""
    text = encode(SYMMETRIC_PREFIX, value)
    problem = secret_problem(text)
    assert (problem is None) == (24 <= len(value) <= 64)
    if problem and value:
        assert base64.b64encode(value).decode() not in problem or len(value) < 3


@given(st.binary(max_size=80))
def test_a_private_key_has_32_bytes_or_64_with_its_public_key(value):
    """C7: both forms of an ed25519 private key lead to its 32 bytes."""
    text = encode(PRIVATE_PREFIX, value)
    assert (secret_problem(text, Scheme.V1A) is None) == (len(value) in (32, 64))
    if len(value) in (32, 64):
        assert private_key_bytes(text) == value[:32]


@given(st.text())
def test_no_other_text_is_a_secret_or_a_public_key(text):
    """C7: a text without the prefix, and one that is not base64, are refused."""
    for scheme in Scheme:
        assert secret_problem(text, scheme)
        assert secret_problem(f"{SYMMETRIC_PREFIX}{text}", Scheme.V1A)
    with pytest.raises(ValueError, match=r"public key|base64"):
        public_key_bytes(text)


@given(st.binary(max_size=40))
def test_a_public_key_has_32_bytes(value):
    """C7: a public key of another length is refused."""
    text = encode(PUBLIC_PREFIX, value)
    if len(value) == 32:
        assert public_key_bytes(text) == value
    else:
        with pytest.raises(ValueError, match="32 bytes"):
            public_key_bytes(text)


@pytest.mark.parametrize(
    "text",
    ["env:", "env:lower", "env:A B", "file:", "file:../x", "file:a/b", "file:/etc/passwd", "file:.hidden", "x:A", "A",
     "env:A\n", "file:a\0", " env:A"],
)  # fmt: skip
def test_a_reference_leaves_neither_its_prefix_nor_its_folder(text):
    """C7: only variables below one prefix and files of one folder can be named."""
    with pytest.raises(ValueError, match="a reference is"):
        parse_reference(text)


@given(st.text(string.ascii_uppercase, min_size=1, max_size=20))
def test_references_have_a_kind_and_a_name(name):
    """C7: `env:` names a variable, `file:` a file."""
    assert parse_reference(f"env:{name}") == ("env", name)
    assert parse_reference(f"file:{name}.txt") == ("file", f"{name}.txt")


def test_a_file_may_have_several_secrets():
    """C7: a file's secrets are rotated by adding a line."""
    assert secrets_in("whsec_a\n\n whsec_b,whsec_c\n") == ["whsec_a", "whsec_b", "whsec_c"]
