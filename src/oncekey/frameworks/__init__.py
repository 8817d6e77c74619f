"""Adapters: from a framework's request to the engine and back. One small package per kind of framework."""
