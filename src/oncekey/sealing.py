"""Sealing: what the store keeps of answers, results, payloads and requests is encrypted before it gets there.

    once = Once("postgresql://localhost/shop", seal=AesGcm({"k2": new, "k1": old}, current="k2"))

Whatever is stored from then on is sealed under the current key, and whatever any of the keys sealed is opened. A `Seal`
of your own may ask a key management service; see docs/howto/encrypt.md.
"""

from __future__ import annotations

import binascii
import os
from base64 import b64decode
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from oncekey.canonical.digests import Hmac
from oncekey.core.enclosing import KEY_ID
from oncekey.core.errors import ConfigurationError, OncekeyError

__all__ = ["KEYS_VARIABLE", "AesGcm", "CannotOpenError", "Seal", "from_environment"]

KEYS_VARIABLE: Final = "ONCEKEY_SEAL_KEYS"
"""Where commands find the keys: `k2:BASE64,k1:BASE64`, the current one first."""

KEY_BYTES: Final = 32
_FOR_KEY: Final = b"1"
_FOR_NONCE: Final = b"2"
_NONCE: Final = 12
_TAG: Final = 16
_NEEDS: Final = "sealing needs AES-GCM: pip install 'oncekey[encryption]'"
_FORM: Final = f"{KEYS_VARIABLE} is NAME:BASE64 of 32 bytes, the current key first, others after a comma"


class CannotOpenError(OncekeyError):
    """These bytes do not open: the key is not there or is another one, or they were sealed for another place."""


class Seal(Protocol):
    """What seals and opens. It may be called by many threads at once, and in an event loop: it must not wait long."""

    @property
    def current(self) -> str:
        """The name of the key that seals now: 1 to 32 letters, digits, `_` or `-`."""

    @property
    def names(self) -> Iterable[str]:
        """The names of all keys that it can open with."""

    def seal(self, plain: bytes, about: bytes) -> tuple[str, bytes]:
        """The current key's name and what it made of this; `about` is where it belongs, to be authenticated with it."""

    def open(self, key_id: str, sealed: bytes, about: bytes) -> bytes:
        """What was sealed under a key, for the same place; `CannotOpenError` if that is impossible."""


class AesGcm:
    """AES-256-GCM under named keys of 32 random bytes; `current` seals, all of them open.

    Every place has a key of its own, derived from the named one by HMAC-SHA-256, and the nonce is an HMAC of the place
    and the content. So nonces can only meet among the few forms that one part of one record ever has, however much a
    store keeps. The same content in the same place is sealed into the same bytes, and a reader learns only that
    equality.
    """

    __slots__ = ("_cipher", "_current", "_invalid", "_roots")

    def __init__(self, keys: Mapping[str, bytes], *, current: str) -> None:
        self._cipher, self._invalid = _aes_gcm()
        if current not in keys:
            raise ConfigurationError(f"current={current!r} is none of the keys: {', '.join(sorted(keys)) or 'none'}")
        for name, key in keys.items():
            check_name(name)
            if len(key) != KEY_BYTES:
                raise ConfigurationError(f"the key {name!r} is not {KEY_BYTES} bytes: os.urandom({KEY_BYTES}) is")
        if len(set(keys.values())) != len(keys):
            raise ConfigurationError("two names have the same key: a new key is made anew")
        self._roots: Mapping[str, Hmac] = MappingProxyType({name: Hmac(key) for name, key in keys.items()})
        self._current = current

    def __repr__(self) -> str:
        return f"AesGcm({', '.join(self._roots)}; current={self._current})"

    @property
    def current(self) -> str:
        """The name of the key that seals now."""
        return self._current

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all keys."""
        return tuple(self._roots)

    def seal(self, plain: bytes, about: bytes) -> tuple[str, bytes]:
        """The current key's name; a nonce, and the encrypted bytes with their tag."""
        root = self._roots[self._current]
        nonce = root.digest(_FOR_NONCE + about + plain)[:_NONCE]
        sealed: bytes = self._cipher(root.digest(_FOR_KEY + about)).encrypt(nonce, plain, about)
        return self._current, nonce + sealed

    def open(self, key_id: str, sealed: bytes, about: bytes) -> bytes:
        """The bytes as they were."""
        root = self._roots.get(key_id)
        if root is None:
            raise CannotOpenError(f"there is no key {key_id}")
        if len(sealed) < _NONCE + _TAG:
            raise CannotOpenError("the sealed bytes are not whole")
        try:
            plain: bytes = self._cipher(root.digest(_FOR_KEY + about)).decrypt(sealed[:_NONCE], sealed[_NONCE:], about)
        except self._invalid as error:
            raise CannotOpenError(f"the key {key_id} is another one, or this was sealed for another place") from error
        return plain


def from_environment(environ: Mapping[str, str] = os.environ) -> AesGcm | None:
    """The seal whose keys are in `ONCEKEY_SEAL_KEYS`; None if there are none."""
    text = environ.get(KEYS_VARIABLE, "").strip()
    if not text:
        return None
    keys: dict[str, bytes] = {}
    for one in text.split(","):
        name, colon, encoded = one.strip().partition(":")
        try:
            key = b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        # What it says instead may be a key, so it is not shown.
        if not colon or name in keys or KEY_ID.fullmatch(name) is None or len(key) != KEY_BYTES:
            raise ConfigurationError(_FORM)
        keys[name] = key
    return AesGcm(keys, current=next(iter(keys)))


def check_name(name: str) -> None:
    """Refuse a name that cannot stand in an envelope."""
    if KEY_ID.fullmatch(name) is None:
        raise ConfigurationError("a key's name has 1 to 32 letters, digits, `_` or `-`: it is stored in clear")


def check_seal(seal: object) -> Seal:
    """Find out when `Once` is made, and not with the first request, that something is no seal."""
    if not all(hasattr(seal, name) for name in ("current", "names", "seal", "open")):
        raise ConfigurationError("seal= takes an oncekey.sealing.AesGcm, or an object with current, names, seal, open")
    check_name(seal.current)  # type: ignore[attr-defined]
    return seal  # type: ignore[return-value]


def _aes_gcm() -> tuple[Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415  (an optional package)
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415  (an optional package)
    except ImportError:
        raise ConfigurationError(_NEEDS) from None
    return AESGCM, InvalidTag
