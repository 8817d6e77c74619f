"""The number of a key's lock: one for each key, of the size that PostgreSQL takes."""

from __future__ import annotations

from itertools import product

import pytest

from oncekey.core.model import RecordId
from oncekey.core.onecommit import Lock, LockNumbers, lock_number

SECRET = b"a secret of this deployment"
PUBLISHED = -2_968_359_966_105_576_180
PUBLISHED_MARKS = (609_898_477, 1_337_725_932)
PUBLISHED_KEYED = -6_978_641_673_471_448_409


def number(schema="oncekey", scope="shop|t1", key="order-1", secret=SECRET):
    return lock_number(schema, RecordId(scope, key), secret)


def test_is_the_same_in_every_process():  # L1
    """Published: two versions of oncekey that disagreed would both run the request."""
    assert number(secret=None) == number(secret=None) == number(secret=b"")
    assert [number(secret=None), number()] == [PUBLISHED, PUBLISHED_KEYED]


@pytest.mark.parametrize(
    "other", [{"schema": "other"}, {"scope": "shop|t2"}, {"key": "order-2"}, {"secret": None}, {"secret": b"another"}]
)
def test_every_part_changes_the_lock_number(other):  # L1
    assert number(**other) != number()


def test_adjacent_name_parts_do_not_collide():  # F19
    """Parts are framed: moving a letter from one to the next is another name."""
    texts = ("", "a", "b", "ab", "aa", "a|b", "1:a", "\x00", "a\x00")
    numbers = [number(*parts) for parts in product(texts, repeat=3)]
    assert len(set(numbers)) == len(numbers)


def test_fits_a_signed_bigint_and_uses_all_of_it():  # F19
    numbers = [number(key=f"key-{n}") for n in range(2000)]
    assert len(set(numbers)) == len(numbers)
    assert all(-(2**63) <= n < 2**63 for n in numbers)
    assert min(numbers) < -(2**62)
    assert max(numbers) > 2**62


@pytest.mark.parametrize("secret", [b"x", b"x" * 64, b"x" * 65, b"x" * 1000])
def test_secret_of_any_length_changes_the_number(secret):
    assert number(secret=secret) != number(secret=secret + b"y")


def test_non_ascii_keys_have_distinct_numbers():
    assert number(key="ключ") != number(key="clé")


def lock(mark="v1:sha256:aa", schema="oncekey", scope="shop|t1", key="order-1", secret=SECRET):
    return LockNumbers(schema, secret).of(RecordId(scope, key), mark)


def test_lock_depends_on_key_and_mark_on_fingerprint():  # R38
    """Published like the number: a mark that another version reads otherwise would be another request's."""
    assert lock(secret=None) == Lock(PUBLISHED, *PUBLISHED_MARKS)
    one, other = lock(), lock("v1:sha256:ab")
    assert (one.number, one.family) == (other.number, other.family) == (number(), one.family)
    assert one.mark != other.mark


@pytest.mark.parametrize(
    "other", [{"schema": "other"}, {"scope": "shop|t2"}, {"key": "order-2"}, {"secret": None}, {"secret": b"another"}]
)
def test_each_lock_family_has_separate_bits(
    other,
):  # R38: two keys whose numbers collide do not take each other's marks
    assert lock(**other).family != lock().family
    assert lock(**other).mark != lock().mark
    assert lock().family not in {lock().number >> 32, lock().number & 0xFFFFFFFF, lock().mark}


def test_marks_fit_two_signed_integers_and_use_all_of_them():
    locks = [lock(key=f"key-{n}") for n in range(500)]
    for numbers in ([one.family for one in locks], [one.mark for one in locks]):
        assert all(-(2**31) <= n < 2**31 for n in numbers)
        assert min(numbers) < -(2**30)
        assert max(numbers) > 2**30
