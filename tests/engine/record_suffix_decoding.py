"""Records what arctic-inference drafts, into `data/suffix_decoding.json.gz`; `test_suffix_decoding.py` replays it.

    uv run --with arctic-inference==0.3.0 python tests/engine/record_suffix_decoding.py

A case is a cache's two settings and calls in their order: ["start", request, prompt], ["add", request, tokens],
["stop", request], and ["speculate", request, [max_spec_tokens, max_spec_factor, min_token_prob], answer], whose context
is all that is known of the request. An answer is its token ids, probabilities, score and length of match. Most cases
are random tokens of a small vocabulary, full of ties, with few cached requests, so that many are evicted; two are
Python source in the embedded model's tokens, as requests for parts of one text, one after another and side by side.
"""

import gzip
import json
import random
import textwrap
from pathlib import Path

import numpy as np

from minivllm.config import EMBEDDED_MODEL
from minivllm.models.tokenizer import load_tokenizer

DATA = Path(__file__).parent / "data" / "suffix_decoding.json.gz"
LIMITS = [(most, factor, least) for most in (1, 3, 8, 24) for factor in (0.3, 1.0, 2.0) for least in (0.0, 0.1, 0.5)]


def random_calls(dice: random.Random, vocab: int, num_calls: int) -> list[list]:
    """Calls on up to four requests at a time, whose tokens are phrases that come back, and noise."""
    phrases = [[dice.randrange(vocab) for _ in range(dice.randrange(2, 30))] for _ in range(3)]
    calls, active, num_requests = [], [], 0

    def tokens(number: int) -> list[int]:
        made: list[int] = []
        while len(made) < number:
            made += dice.choice(phrases)[dice.randrange(2) :] if dice.random() < 0.5 else [dice.randrange(vocab)]
        return made[:number]

    while len(calls) < num_calls:
        if not active or (len(active) < 4 and dice.random() < 0.1):
            active.append(f"r{num_requests}")
            num_requests += 1
            calls.append(["start", active[-1], tokens(dice.randrange(40))])
        elif dice.random() < 0.05:
            calls.append(["stop", active.pop(dice.randrange(len(active)))])
        else:
            request = dice.choice(active)
            calls += [["add", request, tokens(dice.randrange(1, 6))], ["speculate", request, list(dice.choice(LIMITS))]]
    return calls


def source_calls(dice: random.Random, together: bool) -> list[list]:
    """Four requests for parts of one source text, each taken in one to five tokens at a time."""
    text = textwrap.dedent(Path(textwrap.__file__).read_text())
    token_ids = load_tokenizer(EMBEDDED_MODEL).encode(text).ids
    starts = [2000, 2000, 2100, 2300]
    requests = [[["start", f"r{number}", token_ids[start : start + 150]]] for number, start in enumerate(starts)]
    for number, start in enumerate(starts):
        place = start + 150
        while place < start + 300:
            size = dice.randrange(1, 6)
            requests[number].append(["add", f"r{number}", token_ids[place : place + size]])
            requests[number].append(["speculate", f"r{number}", [8, 1.0, 0.1]])
            place += size
    if not together:
        return [call for calls in requests for call in calls]
    merged = []
    while any(requests):
        merged.append(dice.choice([calls for calls in requests if calls]).pop(0))
    return merged


def answered(calls: list[list], max_tree_depth: int, max_cached_requests: int) -> dict:
    """The calls with arctic-inference's answers."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache  # pyright: ignore[reportMissingImports]

    cache, known = SuffixDecodingCache(max_tree_depth, max_cached_requests), {}
    for call in calls:
        name, request, *rest = call
        if name == "start":
            known[request] = rest[0]
            cache.start_request(request, np.array(rest[0], np.int32))
        elif name == "add":
            known[request] = known[request] + rest[0]
            cache.add_active_response(request, np.array(rest[0], np.int32))
        elif name == "stop":
            cache.stop_request(request)
        else:
            most, factor, least = rest[0]
            limits = {"max_spec_tokens": most, "max_spec_factor": factor, "min_token_prob": least}
            draft = cache.speculate(request, np.array(known[request], np.int32), **limits)
            call.append([list(draft.token_ids), list(draft.probs), draft.score, draft.match_len])
    return {"max_tree_depth": max_tree_depth, "max_cached_requests": max_cached_requests, "calls": calls}


def main() -> None:
    """Records all cases."""
    dice = random.Random(7)
    settings = [(24, 100, 3), (24, 2, 5), (8, 1, 3), (3, 3, 2), (4, 0, 4), (2, 5, 3), (24, 2, 50), (6, 3, 300)]
    cases = [answered(random_calls(dice, vocab, 160), depth, cached) for depth, cached, vocab in settings]
    cases += [answered(source_calls(dice, together), 24, 10_000) for together in (False, True)]
    DATA.write_bytes(gzip.compress(json.dumps(cases, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
