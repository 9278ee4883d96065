"""Requests of many kinds: shared beginnings, greedy and seeded, penalties, several answers, stop tokens."""

from minivllm import SamplingParams

SHARED = [(7 * position + 5) % 900 for position in range(40)]
PROMPTS = [SHARED, [*SHARED, 11, 12], SHARED[:17], [9], [*SHARED[:16], 1, 2, 3, 4], [5, 6, 5, 6, 5], SHARED[3:35]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
WISHES = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, max_tokens=20),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2, max_tokens=9, n=2),
    SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.4, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=11, prompt_logprobs=1),
    GREEDY,
    SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[8, 9], min_tokens=3),
]
