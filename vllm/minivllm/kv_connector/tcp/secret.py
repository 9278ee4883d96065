"""The secret that engines share which exchange keys and values over TCP, and where it comes from."""

from __future__ import annotations

import os
from typing import Any

from minivllm.errors import MinivllmError

SECRET_VARIABLE = "MINIVLLM_KV_TRANSFER_SECRET"
LEAST_SECRET = 16
"""Characters."""


def secret_of(settings: str | None, environment: Any = os.environ) -> bytes:
    """The secret that both sides share: what the settings say, else `MINIVLLM_KV_TRANSFER_SECRET`.

    Raises:
        MinivllmError: there is none, or it is short enough to be guessed.
    """
    secret = settings if settings is not None else environment.get(SECRET_VARIABLE, "")
    if not isinstance(secret, str) or len(secret) < LEAST_SECRET:
        raise MinivllmError(
            f"engines that exchange keys and values over TCP share a secret of at least {LEAST_SECRET} characters: set "
            f"{SECRET_VARIABLE} (or kv_connector_extra_config.secret) to the same text on both sides"
        )
    return secret.encode()
