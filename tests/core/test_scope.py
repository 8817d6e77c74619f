"""Scopes: other callers get other scopes, whatever their names are made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.properties import stable, thorough
from harness.each import each
from oncekey.core import scope as scope_module
from oncekey.core.errors import ConfigurationError
from oncekey.core.scope import MAX_SCOPE_LENGTH, BindTo, bound_scope, names_of, scope_of, shown_scope


def test_scope_is_length_prefixed_text():  # R24
    assert scope_of("acme") == "4:acme"
    assert scope_of("shop", "acme", "alice") == "4:shop4:acme5:alice"


@each(
    ("one", "other"),
    [
        (("a", "b"), ("ab",)),
        (("a", "b"), ("b", "a")),
        (("a", "bc"), ("ab", "c")),
        (("a:b",), ("a", "b")),
        (("a1:b",), ("a", "b")),
        (("1:a1:b",), ("a", "b")),
        (("acme",), ("Acme",)),
        (("acme",), ("acme ",)),
        (("a\x00b",), ("ab",)),
        (("a\x00b",), ("a%00b",)),
        (("%",), ("%25",)),
        (("\u00e9",), ("e\u0301",)),
        (("\ud83d\ude02",), ("\U0001f602",)),
        (("\ud800",), ("\ufffd",)),
        (("x" * 300,), ("x" * 301,)),
        (("x" * 150, "y" * 150), ("x" * 151, "y" * 149)),
        (("a", "b" * 250), ("ab", "b" * 249)),
        (("sha256:" + "0" * 64,), ("x" * 300,)),
    ],
)
def test_other_callers_get_other_scopes(one, other):  # R23, R27, R179
    assert scope_of(*one) != scope_of(*other)


@pytest.mark.parametrize(
    "part", ["a\x00b", "a\x1f", "\x7f", "a\x85", "a\u2028", "\ud800", "tab\there", "l\u00e4nd", "a b"]
)
def test_every_store_can_hold_every_scope(part):  # R196
    scope = scope_of("tenant", part)
    assert scope.isascii()
    assert scope.isprintable()
    assert " " not in scope


def test_long_scope_is_replaced_by_a_digest():  # R24, R179
    longest = "x" * (MAX_SCOPE_LENGTH - len("196:"))
    assert scope_of(longest) == f"196:{longest}"
    digest = scope_of(longest + "x")
    assert digest.startswith("sha256:")
    assert len(digest) == len("sha256:") + 64
    assert scope_of(digest) == f"{len(digest)}:{digest}"
    assert scope_of("\u00e4" * 100).startswith("sha256:")


@pytest.mark.parametrize("parts", [(), ("",), ("shop", ""), ("shop", "   "), ("\t\n",), (None,), (42,), (b"acme",)])
def test_caller_without_a_name_is_rejected(parts):  # R23, R25
    with pytest.raises(ConfigurationError) as caught:
        scope_of(*parts)
    assert "must return a non-empty str" in str(caught.value) or not parts


def test_error_names_the_part_but_not_its_value():  # R25
    with pytest.raises(ConfigurationError, match="the tenant is ''"):
        scope_of("shop", "")
    with pytest.raises(ConfigurationError, match="the tenant is None"):
        scope_of("shop", None)
    with pytest.raises(ConfigurationError, match="the principal is of type int"):
        scope_of("-", "shop", "principal", 42)


@pytest.mark.parametrize("parts", [("-", "None"), ("-", "acme", "principal", "None")])
def test_text_of_a_missing_name_is_rejected(parts):  # R25: str(request.user.pk) of every anonymous caller
    with pytest.raises(ConfigurationError, match="is 'None': its function must return a non-empty str"):
        scope_of(*parts)


def test_callers_share_keys_according_to_bind_to():  # R28
    alice = {"principal": "alice", "token": "token-1"}
    alice_again = {"principal": "alice", "token": "token-2"}
    bob = {"principal": "bob", "token": "token-3"}

    def scopes(bind_to: BindTo) -> list[str]:
        return [bound_scope(bind_to, "shop", "acme", **caller) for caller in (alice, alice_again, bob)]

    tenant, principal, token = scopes(BindTo.TENANT), scopes(BindTo.PRINCIPAL), scopes(BindTo.TOKEN)
    assert tenant == [scope_of("shop", "acme")] * 3
    assert principal[0] == principal[1] != principal[2]
    assert len(set(token)) == 3
    assert len({tenant[0], *principal, *token}) == 6


def test_two_tenants_never_meet_however_keys_are_bound():  # R27, R28
    for bind_to in BindTo:
        same_caller = {"principal": "alice", "token": "token-1"}
        assert bound_scope(bind_to, "acme", **same_caller) != bound_scope(bind_to, "umbrella", **same_caller)


def test_a_principal_is_never_taken_for_a_token():  # R28
    digest = bound_scope(BindTo.TOKEN, "acme", token="alice").rpartition(":")[2]
    assert bound_scope(BindTo.PRINCIPAL, "acme", principal=digest) != bound_scope(BindTo.TOKEN, "acme", token="alice")


def test_a_token_is_not_stored_in_clear():  # R195
    assert "s3cret" not in bound_scope(BindTo.TOKEN, "acme", token="s3cret-token")


@pytest.mark.parametrize(
    ("bind_to", "caller"),
    [
        (BindTo.PRINCIPAL, {}),
        (BindTo.PRINCIPAL, {"principal": "", "token": "t"}),
        (BindTo.PRINCIPAL, {"principal": "  "}),
        (BindTo.TOKEN, {"principal": "alice"}),
        (BindTo.TOKEN, {"token": ""}),
    ],
)
def test_missing_bound_value_is_rejected(bind_to, caller):  # R28
    with pytest.raises(ConfigurationError):
        bound_scope(bind_to, "acme", **caller)


def test_binding_does_not_replace_the_tenant():  # R23
    for bind_to in BindTo:
        with pytest.raises(ConfigurationError, match="at least one part"):
            bound_scope(bind_to, principal="alice", token="token-1")


names = st.text(st.characters(), min_size=1, max_size=12).filter(str.strip) | st.sampled_from(
    ["a", "1:a", "4:acme", "sha256:", "%", "%41", "A", "\x00", "1", ":", "\ud800", "x" * 190, "x" * 200, "x" * 400]
).filter(str.strip)
callers = st.lists(names, min_size=1, max_size=4)


@thorough
@given(callers, callers)
def test_scopes_are_equal_exactly_if_the_parts_are(one, other):  # R23, R27
    assert (scope_of(*one) == scope_of(*other)) == (one == other)


@stable
@given(callers)
def test_a_scope_is_short_printable_and_always_the_same(parts):  # R24
    scope = scope_of(*parts)
    assert scope == scope_of(*parts)
    assert len(scope) <= MAX_SCOPE_LENGTH
    assert scope.isascii()
    assert scope.isprintable()


@pytest.mark.parametrize("part", [["acme"], {"a": 1}, None, 7, b"acme", ("acme",)])
def test_non_string_part_is_rejected_with_its_type(part):  # R23
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"the tenant is (None|of type {type(part).__name__}):"):
            scope_of("-", part)


def test_long_scopes_are_not_cached():
    before = scope_module._scope.cache_info().currsize
    assert {scope_of("-", f"{number}" * 300) for number in range(10, 20)} == {
        scope_of("-", f"{number}" * 300) for number in range(10, 20)
    }
    assert scope_module._scope.cache_info().currsize == before
    assert scope_module._scope.cache_info().maxsize is not None


@pytest.mark.parametrize(
    ("parts", "names", "shown"),
    [
        (("-", "acme"), {"tenant": "acme"}, "acme"),
        (("-", "Müller & Söhne"), {"tenant": "Müller & Söhne"}, "Müller & Söhne"),
        (("shop", "acme"), {"tenant": "acme", "namespace": "shop"}, "acme, namespace shop"),
        (
            ("-", "acme", "principal", "alice"),
            {"tenant": "acme", "principal": "alice"},
            "acme, principal alice",
        ),
        (("-", "acme", "token", "5f0c"), {"tenant": "acme", "token_digest": "5f0c"}, "acme, token digest 5f0c"),
        (("-", "acme", "function", "pay"), {"tenant": "acme", "function": "pay"}, "acme, function pay"),
        # A name cannot begin a second line of the log.
        (("-", "acme\noncekey: all is well"), {"tenant": "acme%0Aoncekey%3A%20all%20is%20well"}, None),
    ],
)
def test_scope_names_are_readable(parts, names, shown):
    scope = scope_of(*parts)
    assert names_of(scope) == names
    assert shown_scope(scope) == (shown or names["tenant"])


@pytest.mark.parametrize("scope", ["sha256:" + "0" * 64, "4:acme", "1:-4:acme9:principal", "not a scope"])
def test_a_scope_without_names_is_shown_as_it_is(scope):
    assert names_of(scope) == {"tenant": scope}
    assert shown_scope(scope) == scope
