"""oncekey's tables as Django migrations."""
