"""`oncekey torture`: real servers and workers under faults, and a checker that reads everything afterwards."""
