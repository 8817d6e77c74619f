"""oncekey's tables as migrations of Django's."""
