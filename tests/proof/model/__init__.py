"""An exhaustive model of one key: every actor over the real tables, every interleaving, every crash.

`explore` visits all worlds of a scenario and answers `Proven`, or a `Counterexample` with a shortest trace. The
tables it runs over are the ones that production runs over (`judge`, `rule`, `answer_from`), and what LOCAL in one
commit makes of the lock and the look is the lifecycle's own `enter`. Only what a store's statements do beside them, and
which step a handler takes next, is said again here. `MUTANTS` are laws with one rule left out: that the model finds
what each of them breaks is what makes its "proven" worth something.
"""

from proof.model.explore import Counterexample, Proven, explore
from proof.model.law import SOUND, Law
from proof.model.mutants import MUTANTS, Mutant
from proof.model.world import SCENARIOS, Scenario

__all__ = [
    "MUTANTS",
    "SCENARIOS",
    "SOUND",
    "Counterexample",
    "Law",
    "Mutant",
    "Proven",
    "Scenario",
    "explore",
]
