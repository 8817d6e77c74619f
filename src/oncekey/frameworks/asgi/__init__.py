"""ASGI: a plain middleware that captures and settles, and a decorator that claims at the route.

The two meet in one `Exchange` per keyed request. The middleware sits innermost, so that compression, CORS and
request ids are fresh on every replay; the claim is taken at the route, after authentication and validation.
"""
