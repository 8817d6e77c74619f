"""Work behind the scenes: what nobody waits for, and somebody has to do."""
