"""What the shop does not know after it has asked the provider."""

from __future__ import annotations


class ProviderFailedError(Exception):
    """No answer, or none that says whether there is a charge: a 5xx may come before it or after it."""
