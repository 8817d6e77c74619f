"""The flows, written once, and the shells that run them blocking or under asyncio."""
