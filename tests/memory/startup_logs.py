"""Read `startup_logs.toml`: what vLLM printed at start-up on other people's machines."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

DEFAULTS = {
    "tp": 1, "kv_dtype": "auto", "max_num_batched_tokens": 8192, "steps_in_flight": 1, "by_groups": False,
    "states": None, "tokens": None, "max_model_len": None, "concurrency": None,
}  # fmt: skip
LOGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def logs_of(kind: str) -> list[SimpleNamespace]:
    """Read the logs of one kind, with vLLM's defaults where a log does not say otherwise."""
    return [SimpleNamespace(**(DEFAULTS | row)) for row in LOGS[kind]]
