"""The crash proof: every kind of effects, killed at every statement and every call, and judged by what is left."""
