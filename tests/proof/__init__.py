"""The proofs: every order of a few actors (`model`), seeded orders of many (`sim`), a crash at every step (`crash`).

They perform the code that ships and judge it by `oncekey_demo.checker`; tests run them, and so can you, with `tests`
on the path: `python -m proof.sim.simulator --seed 7`, `python -m proof.crash --store URL`.
"""
