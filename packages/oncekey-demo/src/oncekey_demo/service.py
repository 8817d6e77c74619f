"""The demo for separate worker processes: `oncekey worker --app oncekey_demo.service:once`.

The environment variables ONCEKEY_DEMO_STORE and ONCEKEY_DEMO_PROVIDER name the store and the provider.
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
    workers=False,  # `oncekey worker` imports this module, and runs them
)
once: Once = app.state.once
