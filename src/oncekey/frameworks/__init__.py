"""Adapters between web frameworks and the engine, and the code that they share."""
