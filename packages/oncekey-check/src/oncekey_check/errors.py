"""The base class of the tester's errors."""


class CheckError(Exception):
    """A run cannot begin or continue. The message is one sentence for the user of the command."""
