"""Settings of a KV connector, which moves keys and values between engines. No torch.

In vLLM v0.33.0: `vllm/config/kv_transfer.py` (`KVTransferConfig`).
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from minivllm.config.checks import (
    Rule,
    check_fields,
    checked_arguments,
    encodable,
    one_of,
    settings_of,
)

NAME = Rule(lambda value: isinstance(value, str) and bool(value), "a name")
DICTIONARY = Rule(lambda value: isinstance(value, Mapping), "a dictionary")


@checked_arguments
@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """Settings of the connector that moves keys and values to and from other engines.

    - `kv_connector`: the connector's name, such as "NixlConnector".
    - `engine_id`: names this engine to others; by default a random UUID.
    - `kv_role`: "kv_producer" only gives keys and values away, "kv_consumer" only takes them,
      "kv_both" does both.
    - `kv_connector_extra_config`: settings that only this connector reads.
    - `kv_load_failure_policy`: what happens to a request whose keys and values did not arrive.
      "fail" ends it with an error, "recompute" computes them here.
    """

    kv_connector: Annotated[str, NAME]
    engine_id: Annotated[str, NAME] = field(default_factory=lambda: str(uuid.uuid4()))
    kv_role: Annotated[str, one_of("kv_producer", "kv_consumer", "kv_both")] = "kv_both"
    kv_connector_extra_config: Annotated[Mapping[str, Any], DICTIONARY] = field(default_factory=dict)
    kv_load_failure_policy: Annotated[str, one_of("fail", "recompute")] = "fail"

    @classmethod
    def of(cls, settings: "Mapping[str, Any] | KVTransferConfig | None") -> "KVTransferConfig | None":
        """Create one from a dictionary, the form vLLM takes; None stays None.

        Raises:
            MinivllmError: an unknown key, an invalid value, or `kv_connector` is missing.
        """
        if isinstance(settings, Mapping) and settings.get("engine_id", "") is None:
            # An explicit null means the random default, as in vLLM.
            settings = {name: value for name, value in settings.items() if name != "engine_id"}
        example = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
        return settings_of(cls, "kv_transfer_config", settings, example)

    def __post_init__(self) -> None:
        check_fields(self)
        # Other engines get them as text.
        sent = (self.engine_id, self.kv_connector_extra_config)
        text = json.dumps(sent, ensure_ascii=False, default=str)
        encodable(text, "engine_id or kv_connector_extra_config")

    @property
    def is_kv_producer(self) -> bool:
        """Return whether this engine gives keys and values away."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Return whether this engine takes keys and values from others."""
        return self.kv_role in ("kv_consumer", "kv_both")

    def get_from_extra_config(self, key: str, default: Any = None) -> Any:
        """Return the entry of `kv_connector_extra_config` under this key, or the default."""
        return self.kv_connector_extra_config.get(key, default)
