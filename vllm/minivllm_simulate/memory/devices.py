"""Memory sizes of well-known GPUs.

The sizes are those that a program sees (`torch.cuda.get_device_properties(0).total_memory`): a
little less than the advertised size, because error correction and the driver reserve the rest. They
differ by a few MiB between drivers.
"""

from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.memory import Device

MEMORY_GIB = {
    "T4": 14.563,
    "L4": 22.161,
    "A10G": 22.06,
    "RTX 4090": 23.527,
    "A100-40": 39.494,
    "A100-80": 79.151,
    "H100": 79.179,
    "H200": 139.81,
    "B200": 178.35,
    "MI300X": 191.98,
}

OTHER_NAMES = {
    "4090": "RTX 4090",
    "a100": "A100-80",
    "a10040gb": "A100-40",
    "a10080gb": "A100-80",
    "h10080gb": "H100",
    "h100sxm": "H100",
    "h200sxm": "H200",
}


def get_device(name: str) -> Device:
    """Return the GPU of that name; case, spaces and dashes are ignored ("a100-80", "rtx4090").

    Raises:
        MinivllmError: unknown GPU; the message lists the known ones.
    """
    # "NVIDIA H100 80GB" is "h10080gb".
    plain = _plain(name).removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")
    by_plain_name = {_plain(known): known for known in MEMORY_GIB}
    known = OTHER_NAMES.get(plain) or by_plain_name.get(plain)
    if known is None:
        raise MinivllmError(f"no figures for the GPU {name!r}; known: {', '.join(MEMORY_GIB)}")
    return Device(known, round(MEMORY_GIB[known] * GIB))


def _plain(name: str) -> str:
    return "".join(character for character in str(name).lower() if character.isalnum())
