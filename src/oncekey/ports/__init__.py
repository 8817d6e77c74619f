"""The protocols between the engine, the stores and the drivers."""
