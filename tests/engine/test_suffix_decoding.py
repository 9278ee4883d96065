"""Suffix decoding drafts what arctic-inference drafts, which vLLM calls: `record_suffix_decoding.py` has asked it."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from minivllm.config import SpeculativeConfig
from minivllm.core.output import NewRequestData
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.spec_decode import suffix_loops as loops
from minivllm.worker.spec_decode import suffix_tree
from minivllm.worker.spec_decode.suffix_proposer import SuffixDecodingCache, SuffixProposer
from minivllm.worker.spec_decode.suffix_tree import SuffixTree

CASES = json.loads(gzip.decompress((Path(__file__).parent / "data" / "suffix_decoding.json.gz").read_bytes()))


def ints(token_ids):
    return np.array(token_ids, np.int32)


def replayed(case):
    """Asks for the same drafts; returns how many there were, by length."""
    cache = SuffixDecodingCache(case["max_tree_depth"], case["max_cached_requests"])
    known, lengths = {}, Counter()
    for number, (name, request, *rest) in enumerate(case["calls"]):
        if name == "start":
            known[request] = rest[0]
            cache.start_request(request, ints(rest[0]))
        elif name == "add":
            known[request] = known[request] + rest[0]
            cache.add_active_response(request, ints(rest[0]))
        elif name == "stop":
            cache.stop_request(request)
        else:
            limits, answer = rest
            draft = cache.speculate(request, ints(known[request]), *limits)
            assert [draft.token_ids, draft.probs, draft.score, draft.match_len] == answer, f"call {number}"
            lengths[len(draft.token_ids)] += 1
    return lengths


@pytest.mark.parametrize("gives_back", [False, True], ids=["keeps", "gives_back"])
def test_drafts_probabilities_scores_and_matches_are_those_of_arctic_inference(monkeypatch, gives_back):
    if gives_back:
        monkeypatch.setattr(suffix_tree, "MANY_TOKENS", 0)  # so the text of removed responses goes as soon as it can
    lengths = Counter()
    for case in CASES:
        lengths += replayed(case)
    assert lengths.total() > 800
    assert min(lengths[length] for length in (0, 1, 2, 4, 8)) > 10, "drafts of all lengths were asked for"


def occurrences(sequences, depth):
    """By the book: how often each run of up to `depth` tokens occurs."""
    found = Counter()
    for sequence in sequences:
        for start in range(len(sequence)):
            for end in range(start + 1, min(start + depth, len(sequence)) + 1):
                found[tuple(sequence[start:end])] += 1
    return found


def counted(tree):
    """The counts of all paths of a tree."""
    found, pending = {}, [(0, ())]
    nodes, text, used = tree._nodes, tree._text, int(tree._state[loops.USED])
    while pending:
        parent, path = pending.pop()
        for node in range(1, used):
            if nodes[node, loops.COUNT] and nodes[node, loops.PARENT] == parent:
                slot, longer = nodes[node, loops.TEXT], path
                for _ in range(nodes[node, loops.LENGTH]):
                    longer, slot = (*longer, int(text[slot, 0])), text[slot, 1]
                    found[longer] = int(nodes[node, loops.COUNT])
                pending.append((node, longer))
    return found


def test_a_tree_counts_every_run_of_tokens_and_forgets_those_that_are_removed():
    tree, dice, depth = SuffixTree(5), np.random.default_rng(3), 5
    live = [(tree.start(), []) for _ in range(4)]
    for _ in range(40):
        sequence, tokens = live[dice.integers(len(live))]
        more = dice.integers(0, 3, dice.integers(1, 4)).astype(np.int32)
        tree.extend(sequence, more)
        tokens += more.tolist()
        if dice.random() < 0.1:
            tree.remove(live.pop(dice.integers(len(live)))[0])
            live.append((tree.start(), []))
        assert counted(tree) == occurrences([tokens for _, tokens in live], depth)
    for sequence, _ in live:
        tree.remove(sequence)
    assert counted(tree) == {}
    assert tree._state[loops.USED] == 1 + tree._state[loops.NUM_FREE], "all nodes can be used again"
    assert not tree._table.any()


def test_memory_stays_bounded_while_requests_come_and_go():
    cache, dice, sizes = SuffixDecodingCache(24, 8), np.random.default_rng(0), []
    for number in range(200):
        cache.start_request(str(number), dice.integers(0, 500, 10, np.int32))
        cache.add_active_response(str(number), dice.integers(0, 500, 120, np.int32))
        cache.stop_request(str(number))
        sizes.append(cache.responses.num_bytes)
    assert cache.cached_requests == [str(number) for number in range(192, 200)]
    assert cache.active_requests == set()
    assert max(sizes[100:]) <= max(sizes[:100]), "of 192 responses nothing is left"


def batch_with(prompts):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=16)
    for name, prompt in prompts.items():
        batch._add_request(NewRequestData(name, prompt, prompt, [], 0, SamplingParams()))
    return batch


def proposer_of(**settings):
    return SuffixProposer(SpeculativeConfig(method="suffix", num_speculative_tokens=4, **settings), max_model_len=64)


def propose(proposer, batch, *names):
    return proposer.propose(batch, batch.rows_of(names))


def test_a_request_learns_from_the_response_of_one_before_it():
    """But not from its prompt; and in its own text from both."""
    proposer, batch = proposer_of(), batch_with({"first": [50, 51, 52, 53, 54]})
    batch.append_tokens(batch.rows_of(["first"]), [[1, 2, 3, 4, 5, 6]])
    propose(proposer, batch, "first")
    batch._remove_request("first")
    batch._add_request(NewRequestData("second", [50, 51, 52], [50, 51, 52], [], 0, SamplingParams()))
    assert propose(proposer, batch, "second") == [[]], "53 followed in a prompt"
    batch.append_tokens(batch.rows_of(["second"]), [[2, 3]])
    assert propose(proposer, batch, "second") == [[4, 5]], "as many as match"
    assert proposer.cache.active_requests == {"second"}


def test_a_request_that_comes_back_after_a_preemption_has_its_text_once():
    proposer, batch = proposer_of(), batch_with({"only": [1, 2, 3, 1]})
    rows = batch.rows_of(["only"])
    batch.append_tokens(rows, [[2]])
    assert propose(proposer, batch, "only") == [[3, 1]]
    batch._remove_request("only")
    propose(proposer, batch)
    batch._add_request(NewRequestData("only", [1, 2, 3, 1], [1, 2, 3, 1, 2], [], 0, SamplingParams()))
    batch.append_tokens(batch.rows_of(["only"]), [[3]])
    assert propose(proposer, batch, "only") == [[1, 2, 3]]
    assert counted(proposer.cache.responses) == occurrences([[2, 3]], 24)


def test_no_draft_takes_the_place_of_the_token_behind_it():
    proposer, batch = proposer_of(), batch_with({"long": [1, 2, 3, 4, 5, 6, 7] * 8})
    batch.append_tokens(batch.rows_of(["long"]), [[1, 2, 3, 4, 5]])
    assert propose(proposer, batch, "long") == [[6, 7]]  # 61 tokens, 2 drafts, and one behind them
    batch.append_tokens(batch.rows_of(["long"]), [[6, 7, 1]])
    assert propose(proposer, batch, "long") == [[]]
