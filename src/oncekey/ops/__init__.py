"""Operator views: the condition of a store, its problems, and the effect of a retry. Pure, over core."""
