"""Adapters of the embedded model in `tests/lora_adapters`, and what PEFT and vLLM both generate
with them.
"""

from pathlib import Path

from minivllm import LoRARequest

ADAPTERS = Path(__file__).parents[1] / "lora_adapters"
PROMPT = [516, 994, 8, 65, 12, 309, 288, 281, 386]
EXPECTED = {
    None: [289, 465, 309, 199, 199, 516, 415, 1071],
    "a": [289, 199, 199, 516, 309, 8, 66, 12],
    "b": [409, 65, 61, 281, 379, 289, 326, 309],
    "c": [309, 199, 199, 3, 3, 3, 3, 3],
}
"""Eight greedy tokens in fp32 after PROMPT, without an adapter and with each."""


def request(name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, "abc".index(name) + 1, str(ADAPTERS / name))
