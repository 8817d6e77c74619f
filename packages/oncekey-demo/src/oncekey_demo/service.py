"""The demo for workers of their own: `oncekey worker --app oncekey_demo.service:once`.

The store and the provider are those of the environment: ONCEKEY_DEMO_STORE and ONCEKEY_DEMO_PROVIDER.
"""

from __future__ import annotations

import os
from typing import Final

from oncekey.core.policy import Policy
from oncekey.once import Once
from oncekey_demo.app import DEFAULT_PROVIDER, create_app

STORE_VARIABLE: Final = "ONCEKEY_DEMO_STORE"
PROVIDER_VARIABLE: Final = "ONCEKEY_DEMO_PROVIDER"
DEFAULT_STORE: Final = "sqlite:///oncekey-demo.db"

app = create_app(
    os.environ.get(STORE_VARIABLE, DEFAULT_STORE),
    Policy(),
    os.environ.get(PROVIDER_VARIABLE, DEFAULT_PROVIDER),
    workers=False,  # `oncekey worker`, which imports this module, runs them
)
once: Once = app.state.once
