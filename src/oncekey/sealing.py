"""Sealing: responses, results, payloads and requests are encrypted before they are stored.

    once = Once("postgresql://localhost/shop", seal=AesGcm({"k2": new, "k1": old}, current="k2"))

New content is encrypted with the current key; content encrypted with any of the keys is decrypted. Your own `Seal` may
use a key management service; see docs/howto/encrypt.md.
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
"""The environment variable with the keys, for commands: `k2:BASE64,k1:BASE64`, the current one first."""

KEY_BYTES: Final = 32
_FOR_KEY: Final = b"1"
_FOR_NONCE: Final = b"2"
_NONCE: Final = 12
_TAG: Final = 16
_NEEDS: Final = "sealing needs AES-GCM: pip install 'oncekey[encryption]'"
_FORM: Final = f"{KEYS_VARIABLE} must be NAME:BASE64 of 32 bytes, the current key first, others after a comma"


class CannotOpenError(OncekeyError):
    """The bytes cannot be decrypted: the key is missing or different, or they were sealed for another place."""


class Seal(Protocol):
    """Encrypts and decrypts. Threads and event loops may call it at the same time, so it must not block for long."""

    @property
    def current(self) -> str:
        """The name of the current key: 1 to 32 letters, digits, `_` or `-`."""

    @property
    def names(self) -> Iterable[str]:
        """The names of all keys that it can decrypt with."""

    def seal(self, plain: bytes, about: bytes) -> tuple[str, bytes]:
        """Return the current key's name and the ciphertext; the content's place, `about`, is authenticated."""

    def open(self, key_id: str, sealed: bytes, about: bytes) -> bytes:
        """Decrypt content of the same place; raises `CannotOpenError` if that is impossible."""


class AesGcm:
    """AES-256-GCM with named keys of 32 random bytes; `current` encrypts, all of them decrypt.

    Every place has its own key, derived from the named one by HMAC-SHA-256, and the nonce is an HMAC of the place and
    the content. So nonces can only collide among the few values that one part of one record ever has, however large the
    store. The same content in the same place is sealed into the same bytes, and a reader learns only that equality.
    """

    __slots__ = ("_cipher", "_current", "_invalid", "_roots")

    def __init__(self, keys: Mapping[str, bytes], *, current: str) -> None:
        self._cipher, self._invalid = _aes_gcm()
        if current not in keys:
            raise ConfigurationError(f"current={current!r} is not one of the keys: {', '.join(sorted(keys)) or 'none'}")
        for name, key in keys.items():
            check_name(name)
            if len(key) != KEY_BYTES:
                raise ConfigurationError(
                    f"the key {name!r} is not {KEY_BYTES} bytes: create one with os.urandom({KEY_BYTES})"
                )
        if len(set(keys.values())) != len(keys):
            raise ConfigurationError("two names have the same key: generate a new key for one of them")
        self._roots: Mapping[str, Hmac] = MappingProxyType({name: Hmac(key) for name, key in keys.items()})
        self._current = current

    def __repr__(self) -> str:
        return f"AesGcm({', '.join(self._roots)}; current={self._current})"

    @property
    def current(self) -> str:
        """The name of the current key."""
        return self._current

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all keys."""
        return tuple(self._roots)

    def seal(self, plain: bytes, about: bytes) -> tuple[str, bytes]:
        """Encrypt; returns the current key's name, and the nonce, ciphertext and tag."""
        root = self._roots[self._current]
        nonce = root.digest(_FOR_NONCE + about + plain)[:_NONCE]
        sealed: bytes = self._cipher(root.digest(_FOR_KEY + about)).encrypt(nonce, plain, about)
        return self._current, nonce + sealed

    def open(self, key_id: str, sealed: bytes, about: bytes) -> bytes:
        """Decrypt."""
        root = self._roots.get(key_id)
        if root is None:
            raise CannotOpenError(f"the key {key_id} is missing")
        if len(sealed) < _NONCE + _TAG:
            raise CannotOpenError("the sealed bytes are incomplete")
        try:
            plain: bytes = self._cipher(root.digest(_FOR_KEY + about)).decrypt(sealed[:_NONCE], sealed[_NONCE:], about)
        except self._invalid as error:
            raise CannotOpenError(f"the key {key_id} is different, or this was sealed for another place") from error
        return plain


def from_environment(environ: Mapping[str, str] = os.environ) -> AesGcm | None:
    """The seal with the keys in `ONCEKEY_SEAL_KEYS`; None if it is not set."""
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
        # The value may be a key, so it is not shown.
        if not colon or name in keys or KEY_ID.fullmatch(name) is None or len(key) != KEY_BYTES:
            raise ConfigurationError(_FORM)
        keys[name] = key
    return AesGcm(keys, current=next(iter(keys)))


def check_name(name: str) -> None:
    """Raise for a name that cannot be part of an envelope."""
    if KEY_ID.fullmatch(name) is None:
        raise ConfigurationError("a key's name has 1 to 32 letters, digits, `_` or `-`: it is stored in clear text")


def check_seal(seal: object) -> Seal:
    """Raise when `Once` is created, and not on the first request, if the object is not a seal."""
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
