"""Drafts change how many steps a request takes, and nothing else."""

import functools
import json
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.mixed_requests import completions_of, greedy_answers, run_out
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_MODEL, ModelConfig, SpeculativeConfig
from minivllm.core.stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats
from minivllm.engine.throughput_log import ThroughputLog
from minivllm.models.attention import CausalAttention
from minivllm.models.eagle3 import Eagle3Head
from minivllm.models.forward_context import AuxHiddenStates, ForwardContext
from minivllm.models.linear import weight_bytes
from minivllm.models.loader import random_model
from minivllm.sampling_params import RequestOutputKind
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer
from minivllm.worker.spec_decode.proposer import check_drafter
from minivllm_lab.engines.inside import core_of, runner_of

pytestmark = pytest.mark.usefixtures("warm_processes")

SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 200}
RECORDED = json.loads((Path(__file__).parent / "data" / "spec_decode.json").read_text())
"""What vLLM 0.32 has generated greedily for the embedded model in float32, and its counters over
all of these requests for three tokens a draft: n-grams of 1 to 3 tokens, the embedded draft model,
and the embedded EAGLE-3 head.
"""
DRAFT_MODEL = {"method": "draft_model", "model": str(EMBEDDED_DRAFT), "num_speculative_tokens": 3}
EAGLE3 = {"method": "eagle3", "model": str(EMBEDDED_EAGLE3), "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
REPETITIVE = """def first(self):
        return self.items[0]

    def second(self):
        return self.items[1]

    def third"""


def looked_up(tokens: list[int], most: int, least: int, wanted: int) -> list[int]:
    """Return what follows the first occurrence of the longest suffix that occurs earlier."""
    for length in range(most, least - 1, -1):
        suffix = tokens[-length:]
        for place in range(len(tokens) - length):
            if tokens[place : place + length] == suffix:
                return tokens[place + length : place + length + wanted]
    return []


@given(
    st.lists(st.integers(0, 3) | st.sampled_from([256, 65536, 1 << 24]), min_size=1, max_size=40),
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 5),
)  # fmt: skip
def test_the_longest_suffix_is_looked_up_at_its_first_place(tokens, bound, other, wanted):
    most, least = max(bound, other), min(bound, other)
    config = SpeculativeConfig(num_speculative_tokens=wanted, prompt_lookup_max=most, prompt_lookup_min=least)
    proposer = NgramProposer(config, max_model_len=1000)
    assert proposer.drafts_after(np.array(tokens, np.int32)) == looked_up(tokens, most, least, wanted)


def test_no_draft_reaches_beyond_the_last_position():
    proposer = NgramProposer(SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=1), max_model_len=8)
    assert proposer.drafts_after(np.array([1, 2, 3, 4, 5, 1], np.int32)) == [2, 3]
    assert proposer.drafts_after(np.array([1, 2, 3, 4, 5, 6, 7, 1], np.int32)) == []


@pytest.fixture(scope="module")
def plain():
    return LLM(EMBEDDED_MODEL, **SETTINGS)


@pytest.fixture(scope="module")
def lookup():
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
    return LLM(EMBEDDED_MODEL, **SETTINGS, speculative_config=config)


@pytest.mark.parametrize("config", [NGRAM, DRAFT_MODEL, EAGLE3], ids=["ngram", "draft_model", "eagle3"])
def test_vllms_tokens_and_counters(config):
    prompts = [request["prompt_token_ids"] for request in RECORDED["requests"]]
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, speculative_config=config)
    assert greedy_answers(llm, prompts, 64) == [request["token_ids"] for request in RECORDED["requests"]]
    assert asdict(llm.llm_engine.stats.spec_decoding_stats) == RECORDED[config["method"]]


def random_batch(seed):
    """Draw up to six requests, some with a common prefix, some greedy, some with a seed."""
    rng = np.random.default_rng(seed)
    whole = RECORDED["requests"][seed % 8]["prompt_token_ids"]
    prompts, params = [], []
    for index in range(rng.integers(1, 7)):
        start = rng.choice([0, 0, rng.integers(0, 40)])
        prompts.append(whole[start : start + rng.integers(1, 50)])
        temperature = float(rng.choice([0.0, 0.0, 0.8]))
        most = int(rng.integers(1, 30))
        params.append(SamplingParams(temperature=temperature, seed=index, max_tokens=most, ignore_eos=True))
    return prompts, params


FEW_BLOCKS = {"max_model_len": 96, "block_size": 4, "num_gpu_blocks_override": 26, "max_num_batched_tokens": 40}
WITHOUT_CACHE = {"max_model_len": 64, "max_num_batched_tokens": 9, "attention_backend": "naive", "use_kv_cache": False}


@functools.cache
def tokens_of_batches(count, **changes):
    """Return the tokens of the first `count` batches from an engine without a drafter."""
    plain = LLM(EMBEDDED_MODEL, **SETTINGS | changes)
    return [completions_of(plain, *random_batch(seed)) for seed in range(count)]


DRAFTERS = [
    (DRAFT_MODEL, WITHOUT_CACHE),
    (DRAFT_MODEL, {**FEW_BLOCKS, "kv_cache_dtype": "int8", "async_scheduling": True}),
    (EAGLE3, {**FEW_BLOCKS, "async_scheduling": True}),
    (EAGLE3, WITHOUT_CACHE),
]


@pytest.mark.parametrize(("config", "changes"), DRAFTERS)
def test_the_tokens_without_a_drafter(config, changes):
    drafting = LLM(EMBEDDED_MODEL, **SETTINGS | changes, speculative_config=config)
    count = 1 if changes is WITHOUT_CACHE else 2  # a step without a cache computes every token again
    plain = tokens_of_batches(count, **changes | {"async_scheduling": False, "num_gpu_blocks_override": 200})
    assert [completions_of(drafting, *random_batch(seed)) for seed in range(count)] == plain
    stats = drafting.llm_engine.stats
    assert stats.spec_decoding_stats.num_accepted_tokens > 20 * count
    assert stats.num_preemptions > 0 or "num_gpu_blocks_override" not in changes


def keys_without_cache(drafter, target, token_ids):
    """Compute the last layer's keys of these tokens in one pass: [tokens, kv_heads, head_dim].

    An EAGLE head has no key of the last token: its key at each position is for the token after it.
    """
    attention, result = CausalAttention(drafter.config), []

    def keep(layer, q, k, v):
        result.append(k)
        return attention(layer, q, k, v)

    ids = torch.from_numpy(token_ids)
    positions = torch.arange(len(ids))
    with torch.inference_mode():
        if isinstance(drafter, Eagle3Head):
            aux = AuxHiddenStates(drafter.eagle_config.aux_layer_ids)
            target(ids[:-1], positions[:-1], ForwardContext(CausalAttention(target.config), aux))
            hidden = drafter.combine_hidden_states(torch.cat(aux.states, dim=-1))
            drafter(ids[1:], positions[:-1], hidden, keep)
        else:
            drafter(ids, positions, keep)
    return result[-1]


@pytest.mark.parametrize("config", [DRAFT_MODEL, EAGLE3], ids=["draft_model", "eagle3"])
def test_the_drafters_cache_holds_every_token_that_the_targets_does(config):
    """This holds whatever was drafted, rejected, hit in the prefix cache, preempted or computed in
    chunks on the way.

    An EAGLE head is one token behind where the last token has just been sampled. Otherwise it needs
    the next token, so a block that a shorter prompt has left ends with a key that a longer prompt
    does not have.
    """
    llm = LLM(EMBEDDED_MODEL, **SETTINGS | FEW_BLOCKS, speculative_config=config)
    runner, steps = runner_of(llm), []
    batch, execute = runner.batch, runner.execute_model

    def observed(scheduler_output):
        output = execute(scheduler_output)
        steps.append(0)
        if len(steps) % 4:
            return output  # a wrong key stays in the cache until a later step looks
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            row, sampled = batch.row_of[req_id], output.sampled_token_ids.get(req_id)
            end = batch.num_tokens[row] if sampled else batch.num_computed_tokens[row] + count
            end += config is EAGLE3 and not sampled
            expected = keys_without_cache(runner.speculator.model, runner.model, batch.token_ids[row, :end])
            end = len(expected)
            keys = runner.speculator.attention.kv_caches[-1].keys  # [blocks, 4, kv_heads, head_dim]
            actual = keys[batch.block_table[row, : -(-end // 4)]].flatten(0, 1)[:end]
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)
        return output

    runner.execute_model = observed
    llm.generate(*random_batch(0))
    beginning = RECORDED["requests"][3]["prompt_token_ids"][:12]
    for prompt in (beginning, beginning + beginning):
        greedy_answers(llm, [prompt], 4)
    stats = llm.llm_engine.stats
    assert len(steps) > 20
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_stats.hits > 0


def test_a_draft_model_must_have_the_models_tokens_and_reach_as_far():
    config = ModelConfig.from_pretrained(EMBEDDED_DRAFT)
    check_drafter(config, config, 2048)
    other = replace(config, vocab_size=100)
    assert_refused("vocabulary of 4096 tokens, but the model has 100", check_drafter, config, other, 512)
    assert_refused(r"supports at most 2048 tokens: lower max_model_len from 2049", check_drafter, config, config, 2049)


def test_the_ledger_counts_weights_and_cache_of_the_draft_model():
    changed = {**SETTINGS, "max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": None}
    llm = LLM(EMBEDDED_MODEL, **changed, speculative_config=DRAFT_MODEL, kv_cache_dtype="int8")
    ledger, runner = core_of(llm).ledger, runner_of(llm)
    caches = [*runner.attention.kv_caches, *runner.speculator.attention.kv_caches]
    allocated = sum(tensor.nbytes for cache in caches for tensor in cache)
    assert allocated == ledger.num_blocks * ledger.block_size * ledger.bytes_per_token == ledger.kv_bytes
    [weights] = [row.bytes for row in ledger.rows if row.name == "draft model"]
    assert weights == weight_bytes(runner.speculator.model)
    assert sum(row.bytes for row in ledger.rows) == ledger.device.memory_bytes


def test_random_requests_keep_their_tokens_and_log_probabilities(plain, lookup):
    """Each draw depends on its request's seed and position, so the output does not show whether
    there were drafts.
    """
    params = [
        SamplingParams(temperature=0.7, seed=3, max_tokens=30, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, top_p=0.8, presence_penalty=0.4, n=2),
        SamplingParams(temperature=0.9, seed=5, max_tokens=30, stop=["return"]),
        SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.1, min_tokens=20),
    ]
    prompts = [REPETITIVE, REPETITIVE, "class Stack:\n    def __init__", "import os\nimport "]
    results = [[each for output in llm.generate(prompts, params) for each in output.outputs] for llm in (plain, lookup)]
    for expected, result in zip(*results, strict=True):
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        for entry, expected_entry in zip(result.logprobs or (), expected.logprobs or (), strict=True):
            for token_id, logprob in expected_entry.items():
                assert entry[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-3)


PROBABILISTIC = {**DRAFT_MODEL, "draft_sample_method": "probabilistic"}


def test_a_seeded_request_draws_the_same_drafts_and_tokens_in_any_company(plain):
    prompt = RECORDED["requests"][0]["prompt_token_ids"]
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=40, logprobs=1, ignore_eos=True) for seed in (1, 2)]
    company = [SamplingParams(temperature=0.0, max_tokens=25), SamplingParams(temperature=1.0, top_k=5, max_tokens=30)]
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, speculative_config=PROBABILISTIC)
    alone = [llm.generate([prompt], param)[0].outputs[0] for param in params]
    accepted = llm.llm_engine.stats.spec_decoding_stats.num_accepted_tokens
    prompts = [prompt[:50], prompt, prompt[:90], prompt]
    greedy, *others = completions_of(llm, prompts, [company[0], params[0], company[1], params[1]])
    assert [others[0], others[2]] == [[each.token_ids] for each in alone]
    assert [greedy] == completions_of(plain, prompts[:1], company[0])
    assert accepted > 15
    for completion in alone:
        again = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        [told] = plain.generate([prompt + completion.token_ids], again)
        for token_id, ours, theirs in zip(
            completion.token_ids, completion.logprobs, told.prompt_logprobs[len(prompt) :], strict=True
        ):
            assert ours[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=1e-3)


def small_model(folder, layers):
    """Make a random model of eight tokens, and a function from token ids to the probabilities of
    the next one.
    """
    config = json.loads((EMBEDDED_DRAFT / "config.json").read_text())
    config |= {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 1, "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = random_model(ModelConfig.from_pretrained(folder), dtype="float32")

    def probabilities(prefixes):
        lengths = [len(prefix) for prefix in prefixes]
        ids = torch.tensor(list(chain.from_iterable(prefixes)))
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = torch.tensor(lengths).cumsum(0) - 1
        with torch.inference_mode():
            hidden = model(ids, positions, CausalAttention(model.config, lengths))[ends]
            return (SHARPNESS * model.compute_logits(hidden)).softmax(-1)

    return folder, probabilities


SHARPNESS = 10.0
"""One divided by the temperature: a random model's logits lie close together."""


def test_drawn_drafts_leave_the_distribution_as_it_is_and_are_accepted_as_often_as_p_and_q_overlap(tmp_path):
    (target, p), (drafter, q) = small_model(tmp_path / "target", 2), small_model(tmp_path / "drafter", 1)
    config = {"model": str(drafter), "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    llm = LLM(
        target, device="cpu", dtype="float32", load_format="dummy", skip_tokenizer_init=True, max_model_len=8,
        max_num_seqs=1000, max_num_batched_tokens=8000, num_gpu_blocks_override=2000, block_size=8,
        speculative_config=config,
    )  # fmt: skip
    count, prompt = 3000, [3, 1]
    base = {"temperature": 1 / SHARPNESS, "max_tokens": 3, "ignore_eos": True}
    params = [SamplingParams(**base, seed=seed) for seed in range(count)]
    actual = torch.zeros(8, 8, 8)
    for [tokens] in completions_of(llm, [prompt] * count, params):
        actual[tuple(tokens)] += 1
    first = p([prompt])[0]  # [8]
    second, drafts = (of([[*prompt, a] for a in range(8)]) for of in (p, q))  # [8, 8]
    third = p([[*prompt, a, b] for a in range(8) for b in range(8)]).view(8, 8, 8)
    expected = count * first[:, None, None] * second[:, :, None] * third
    often = expected > 5  # the others are one cell
    actual, expected = (torch.cat((table[often], table[~often].sum().view(1))) for table in (actual, expected))
    chi_square, degrees = ((actual - expected) ** 2 / expected).sum().item(), len(actual) - 1
    assert degrees > 100
    assert chi_square < degrees + 3.1 * (2 * degrees) ** 0.5, "p > 0.001"
    overlap = (first * torch.minimum(second, drafts).sum(-1)).sum().item()
    num_accepted = 2 * count - llm.llm_engine.stats.spec_decoding_stats.num_drafts  # else there is a second draft
    sigma = (overlap * (1 - overlap) / count) ** 0.5
    assert overlap < 0.9
    assert num_accepted / count == pytest.approx(overlap, abs=3 * sigma)


@pytest.mark.parametrize(
    ("method", "ahead"), [({"prompt_lookup_min": 1}, False), ({"model": str(EMBEDDED_DRAFT)}, True)]
)
def test_fewer_drafts_or_none_at_times_change_no_token_of_a_greedy_request(plain, method, ahead):
    prompts = [REPETITIVE, REPETITIVE[:60], REPETITIVE, "class Stack:\n    def __init__", REPETITIVE]
    schedule = [(1, 1, 4), (2, 2, 2), (3, 3, 0), (4, 8, 1)]
    config = {**method, "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": schedule}
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, async_scheduling=ahead, speculative_config=config)
    lengths = [48, 39, 30, 21, 12]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    assert completions_of(llm, prompts, params) == completions_of(plain, prompts, params)
    stats = llm.llm_engine.stats.spec_decoding_stats
    assert stats.num_accepted_tokens > 10
    assert stats.num_draft_tokens < 3 * stats.num_drafts, "most are shorter than the four allowed"


def streamed(llm, params):
    """Join the pieces of a DELTA stream: tokens, text, log probabilities, and the last cumulative
    log probability.
    """
    llm.llm_engine.add_request("streamed", REPETITIVE, replace(params, output_kind=RequestOutputKind.DELTA))
    token_ids, text, logprobs, total = [], "", [], None
    for output in run_out(llm.llm_engine):
        [piece] = output.outputs
        token_ids, text, logprobs = token_ids + piece.token_ids, text + piece.text, logprobs + piece.logprobs
        total = piece.cumulative_logprob
    return token_ids, text, logprobs, total


def test_nothing_stays_of_the_drafts_behind_a_stop_string(plain, lookup):
    """Neither the whole output nor the pieces of a stream hold their tokens or log probabilities."""
    base = SamplingParams(temperature=0.0, max_tokens=60, logprobs=0, ignore_eos=True)
    [free] = plain.generate([REPETITIVE], base)
    words = [plain.llm_engine.tokenizer.decode([token]) for token in free.outputs[0].token_ids[3:40:12]]
    cut = 0
    for word in words:
        params = replace(base, stop=[word])
        [expected], [result] = plain.generate([REPETITIVE], params), lookup.generate([REPETITIVE], params)
        expected, result = expected.outputs[0], result.outputs[0]
        assert (result.token_ids, result.text, result.stop_reason) == (expected.token_ids, expected.text, word)
        assert len(result.logprobs) == len(result.token_ids)
        assert result.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
        token_ids, text, logprobs, total = streamed(lookup, params)
        assert (token_ids, text) == (result.token_ids, result.text)
        assert [list(entry) for entry in logprobs] == [[token] for token in token_ids]
        assert total == pytest.approx(expected.cumulative_logprob, abs=1e-3)
        cut += len(result.token_ids) < 60
    assert cut == len(words)


def test_the_log_tells_what_became_of_drafts_since_the_last_line(monkeypatch, caplog):
    monkeypatch.setattr("minivllm.engine.throughput_log.SECONDS", 0.0)
    stats = SchedulerStats(1, 0, 0.5, PrefixCacheStats(), SpecDecodingStats(40, 100, 45, [30, 10, 5]), 0)
    log = ThroughputLog()
    with caplog.at_level("INFO"):
        for counts in (SpecDecodingStats(20, 40, 15, [10, 5]), SpecDecodingStats(40, 100, 45, [30, 10, 5])):
            log.observe(1, 1, replace(stats, spec_decoding_stats=counts))
            log.observe(1, 1, replace(stats, spec_decoding_stats=counts))
    lines = [record.getMessage() for record in caplog.records if "SpecDecoding" in record.getMessage()]
    assert len(lines) == 2, "none where nothing was drafted"
    assert lines[1].startswith("SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: ")
    assert "Accepted: 30 tokens, Drafted: 60 tokens, Per-position acceptance rate: 1.000, 0.250, 0.250, " in lines[1]
    assert lines[1].endswith("Avg Draft acceptance rate: 50.0%")
