"""oncekey."""
