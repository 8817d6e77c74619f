"""The base of the tester's errors."""


class CheckError(Exception):
    """A run cannot begin or continue. The message is one sentence for the person who typed the command."""
