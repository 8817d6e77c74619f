"""Blocking twins of the modules for asyncio, written by `python -m tools.twins`: edit those."""
