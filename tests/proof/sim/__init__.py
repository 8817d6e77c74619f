"""The parts of the simulator, one idea each; `proof.sim.simulator` is the door."""
