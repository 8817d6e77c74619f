"""What a handler may have left in a session, and the one message that takes it out again.

A setting, a role, a lock of the session, a cursor, a temporary table: a function can make each of them without a
word of it in the handler's own text, so the text is no proof that there is none. The message goes to the server after
the end of every transaction that a handler used, and nobody waits for its answer but the connection's next borrower.
"""

from __future__ import annotations

from typing import Final

RESET: Final = (
    "SET SESSION AUTHORIZATION DEFAULT; RESET ROLE; RESET ALL; SELECT pg_advisory_unlock_all(); CLOSE ALL; UNLISTEN *; "
    "DISCARD TEMP"
)
"""The session as it was when it was opened.

DISCARD ALL would be one word for it, but it also forgets every prepared statement, which the drivers believe to be
there, and every plan, which makes the next request dearer than this message. RESET ROLE comes after the session's user,
because that one ends the role which an address may have asked for, too.
"""
