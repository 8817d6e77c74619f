"""The four kinds of effects by their names, for `@once.protect(effects=LOCAL)`."""

from typing import Final

from oncekey.core.model import Effects

LOCAL: Final = Effects.LOCAL
PHASED: Final = Effects.PHASED
OUTBOX: Final = Effects.OUTBOX
INLINE: Final = Effects.INLINE
