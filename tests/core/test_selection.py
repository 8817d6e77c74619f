"""Which fields count: names and pointers, what they find and what they leave."""

from __future__ import annotations

import pytest

from oncekey.core.errors import ConfigurationError
from oncekey.core.selection import Selection, path_of

ORDER = {
    "amount": 10,
    "customer": {"id": "c1", "ts": 5},
    "items": [{"sku": "a", "ts": 1}, {"sku": "b", "ts": 2}],
    "a/b": {"m~n": 1},
    "": "empty name",
    "/": 2,
}


def test_include_and_exclude_at_once_are_refused():  # R39
    with pytest.raises(ConfigurationError, match="include and exclude at once"):
        Selection(include=("a",), exclude=("b",))


@pytest.mark.parametrize("fields", ["amount", ["amount"], ("",), (None,), (1,), ("ok", "")])
@pytest.mark.parametrize("where", ["include", "exclude"])
def test_what_is_not_a_tuple_of_names_is_refused(fields, where):  # R39
    with pytest.raises(ConfigurationError, match=f"{where} of a selection is not a tuple of field names"):
        Selection(**{where: fields})


@pytest.mark.parametrize("pointer", ["/a~", "/a~2", "/~~0", "/a/b~x"])
def test_what_only_looks_like_a_pointer_is_refused(pointer):  # R39
    with pytest.raises(ConfigurationError, match="not a JSON pointer"):
        Selection(exclude=(pointer,))


def test_a_name_may_have_a_tilde():
    assert Selection(include=("a~b",)).included({"a~b": 1}) == {"/a~0b": 1}


def test_nothing_selected_is_everything():  # R39
    assert not Selection()
    assert Selection(include=("a",))
    assert Selection(exclude=("a",))
    assert Selection().included(ORDER) == {}
    assert Selection().rest(ORDER) is ORDER


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("amount", {"/amount": 10}),
        ("/amount", {"/amount": 10}),
        ("/customer/id", {"/customer/id": "c1"}),
        ("/items/1/sku", {"/items/1/sku": "b"}),
        ("/a~1b/m~0n", {"/a~1b/m~0n": 1}),
        ("a/b", {"/a~1b": {"m~n": 1}}),
        ("/", {"/": "empty name"}),
        ("/~1", {"/~1": 2}),
        ("missing", {}),
        ("/customer/missing", {}),
        ("/amount/deeper", {}),
        ("/items/2", {}),
        ("/items/-", {}),
        ("/items/01", {}),
        ("/items/-1", {}),
        ("/items/x", {}),
        ("customer.id", {}),
    ],
)
def test_what_a_field_finds(field, found):  # R39: RFC 6901
    assert Selection(include=(field,)).included(ORDER) == found


def test_pointers_into_an_array_at_the_top():  # R39
    assert Selection(include=("/0/sku",)).included(ORDER["items"]) == {"/0/sku": "a"}


def test_excluded_fields_are_left_out_and_nothing_else():  # R39
    selection = Selection(exclude=("amount", "/customer/ts", "/items/0/ts", "/items/1", "/nowhere/at/all"))
    assert selection.rest(ORDER) == {
        "customer": {"id": "c1"},
        "items": [{"sku": "a"}],
        "a/b": {"m~n": 1},
        "": "empty name",
        "/": 2,
    }


def test_several_indices_mean_the_array_as_it_came():  # R39
    assert Selection(exclude=("/0", "/1", "/3")).rest(["a", "b", "c", "d", "e"]) == ["c", "e"]
    assert Selection(exclude=("/0", "/0/x")).rest([{"x": 1}, {"x": 2}]) == [{"x": 2}]


def test_excluding_never_changes_what_came_in():
    body = {"a": {"b": 1, "c": 2}}
    assert Selection(exclude=("/a/b",)).rest(body) == {"a": {"c": 2}}
    assert body == {"a": {"b": 1, "c": 2}}


@pytest.mark.parametrize("value", [5, "text", None, True])
def test_a_value_without_fields_stays_whole(value):  # R39
    assert Selection(exclude=("a", "/b/c")).rest(value) == value
    assert Selection(include=("a",)).included(value) == {}


def test_names_of_a_form():  # R39
    names = ["a", "b", "a", "c/d"]
    assert Selection(include=("a",)).of_names(names) == [0, 2]
    assert Selection(include=("/c~1d",)).of_names(names) == [3]
    assert Selection(exclude=("a", "c/d")).of_names(names) == [1]
    assert Selection(include=("missing", "/a/b")).of_names(names) == [0, 1, 2, 3]


def test_a_path_is_its_steps():
    assert path_of("amount") == ("amount",)
    assert path_of("/a/b") == ("a", "b")
    assert path_of("/~01") == ("~1",)
