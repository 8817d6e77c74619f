"""The parts of the simulator, one idea each; `oncekey.testing.simulator` is the door."""
