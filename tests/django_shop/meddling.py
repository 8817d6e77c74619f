"""A middleware that reads what is not its to read."""

from __future__ import annotations


class Reads:
    def __init__(self, get_response) -> None:
        self.get_response = get_response

    def __call__(self, request):
        request.read(1)
        return self.get_response(request)
