"""The four kinds of effects by their names, for `@once.protect(effects=LOCAL)`."""

from typing import Final

from oncekey.core.model import Effects

LOCAL: Final = Effects.LOCAL
"""The handler writes to its own database only, in the commit that stores its answer."""
PHASED: Final = Effects.PHASED
"""The handler does named steps, and each is done once, also if another process goes on after a crash."""
OUTBOX: Final = Effects.OUTBOX
"""The handler writes to its own database, and leaves one outside call to a worker."""
INLINE: Final = Effects.INLINE
"""The handler talks to the outside directly; after a crash it is unknown what was sent."""
