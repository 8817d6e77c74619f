"""OpenAPI by drf-spectacular: `"oncekey.django.spectacular.describe_keys"` as the last of POSTPROCESSING_HOOKS."""

from __future__ import annotations

from typing import Any

from oncekey.django.routes import served
from oncekey.frameworks.openapi import describe


def describe_keys(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:  # noqa: ANN401, ARG001, FBT001  (drf-spectacular's signature)
    """Write into the document what each protected operation takes and answers."""
    describe(result, served())  # parts of paths may be called otherwise there: `{pk}` is `{id}` of its model
    return result
