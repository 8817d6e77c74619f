"""Middleware that reads the body before oncekey's does."""

from __future__ import annotations

import os


class Reads:
    def __init__(self, get_response) -> None:
        self.get_response = get_response

    def __call__(self, request):
        request.read(1)
        return self.get_response(request)


class ReadsEarly:
    """Reads the attribute of the request that the environment names, as logging and signature checks do."""

    def __init__(self, get_response) -> None:
        self.get_response = get_response

    def __call__(self, request):
        getattr(request, os.environ["SHOP_READS"])
        return self.get_response(request)
