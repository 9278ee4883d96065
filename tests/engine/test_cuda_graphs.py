"""CUDA graphs: which graph each batch uses, and that padding changes nothing.

Without a GPU a "graph" is the same step computed again on the same buffers: everything but the
capture itself is real.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine.captured import capture_with
from engine.mixed_requests import PROMPTS

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.platforms.threads import has_numba
from minivllm.worker.cuda_graphs import capture_sizes
from minivllm.worker.input_batch import StepInputs
from minivllm_lab.engines.inside import core_of, runner_of

SETTINGS = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96, "max_num_seqs": 6}
PROMPTS = [*PROMPTS, [7] * 9]
WISHES = [
    SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=16 - index, ignore_eos=True)
    for index in range(len(PROMPTS))
]
WISHES[3] = replace(WISHES[3], prompt_logprobs=1)


CAPTURED = [
    (1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (5, [1, 2, 4, 8]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 16]),
    (256, [1, 2, 4, *range(8, 257, 8)]), (300, [1, 2, 4, *range(8, 256, 8), 256, 272, 288, 304]),
    (1024, [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]),
]  # fmt: skip


@pytest.mark.parametrize(("max_num_seqs", "sizes"), CAPTURED)
def test_capture_sizes(max_num_seqs, sizes):
    assert capture_sizes(max_num_seqs) == sizes


@pytest.fixture(scope="module")
def eager():
    return LLM(EMBEDDED_MODEL, **SETTINGS, enforce_eager=True)


@pytest.fixture(scope="module", params=["recorded", "computed again"])
def graphed(request):
    if request.param == "recorded":
        if not has_numba():
            pytest.skip("recordings are numba's")
        return LLM(EMBEDDED_MODEL, **SETTINGS)
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, enforce_eager=True)
    capture_with(runner_of(llm), lambda function: function)
    return llm


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, WISHES)]


def test_the_largest_is_captured_first_and_nothing_is_written_to_the_cache():
    runner, sizes = runner_of(LLM(EMBEDDED_MODEL, **SETTINGS, enforce_eager=True)), []

    def record(function):
        function()
        return function

    runner.model.register_forward_pre_hook(lambda model, inputs: sizes.append(len(inputs[0])))
    capture_with(runner, record)
    assert sizes == [8, 4, 2, 1]
    assert not any(cache.keys.any() or cache.values.any() for cache in runner.attention.kv_caches)


def test_the_same_tokens_with_graphs(eager, graphed):
    graphs = runner_of(graphed).cuda_graphs.decode
    before = graphs.replays
    assert tokens_of(graphed) == tokens_of(eager)
    assert graphs.replays - before > 10
    assert runner_of(eager).cuda_graphs.decode is None
    assert runner_of(graphed).cuda_graphs.verification is None, "there are no drafts"


def step(num_rows: int, keys: int = 20) -> StepInputs:
    """Make a decode step whose requests use the last blocks of the cache."""
    return StepInputs(
        req_ids=[str(row) for row in range(num_rows)], rows=np.arange(num_rows),
        input_ids=np.arange(3, 3 + num_rows, dtype=np.int32), positions=np.full(num_rows, keys - 1),
        slot_mapping=16 * (30 + np.arange(num_rows)) + (keys - 1) % 16,
        query_start_loc=np.arange(num_rows + 1, dtype=np.int32), seq_lens=np.full(num_rows, keys, np.int32),
        block_table=np.stack([np.full(2, 30 + row, np.int32) for row in range(num_rows)]), drafts={},
        **dict.fromkeys(("sampling", "num_sampled", "logits_indices"), np.zeros(0, np.int64)),
    )  # fmt: skip


@torch.inference_mode()
def test_padding_rows_write_nothing_and_are_looked_at_by_nobody(graphed):
    runner = runner_of(graphed)
    graphs = runner.cuda_graphs.decode
    graphs.replay(step(6))
    full = graphs.replay(step(3)).clone()
    torch.testing.assert_close(graphs.logits[:3], runner.model.compute_logits(full).float())

    caches = runner.attention.kv_caches
    before = [cache.keys.clone() for cache in caches]
    graphs.replay(step(3, keys=23))
    for cache, old in zip(caches, before, strict=True):
        changed = (cache.keys != old).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[30, 6], [31, 6], [32, 6]], "block and offset of the three real rows"


def test_what_there_is_no_graph_for_runs_eagerly(graphed):
    manager = runner_of(graphed).cuda_graphs
    assert manager.dispatch(step(8)) is manager.decode
    assert manager.dispatch(step(9)) is None
    chunk = step(3)
    chunk.req_ids, chunk.query_start_loc = chunk.req_ids[:2], np.array([0, 1, 3], np.int32)
    assert manager.dispatch(chunk) is None


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
AGAIN = [[1, 2, 3, 4] * 8, [5, 6, 7] * 9, [8, 9, 10, 11, 12] * 4, [13] * 20, [*range(20, 40)], [14, 15] * 10]


def drafted_tokens_of(llm: LLM) -> list[list[int]]:
    """Return the answers to prompts in which drafts are found, at times for only some of the
    requests.
    """
    return [output.outputs[0].token_ids for output in llm.generate(AGAIN, WISHES[: len(AGAIN)])]


def test_drafts_are_verified_in_graphs_too_however_many_a_request_has(eager):
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, speculative_config=NGRAM)
    runner, ragged = runner_of(llm), []
    capture_with(runner, lambda function: function)
    graphs = runner.cuda_graphs.verification
    assert (graphs.tokens_each, graphs.sizes) == (4, [1, 2, 4, 8])
    load = graphs.buffers.load
    graphs.buffers.load = lambda inputs: ragged.append(len({*np.diff(inputs.query_start_loc)}) > 1) or load(inputs)
    assert drafted_tokens_of(llm) == drafted_tokens_of(eager)
    assert graphs.replays > 5
    assert 0 < sum(ragged) < len(ragged)


def test_graphs_for_drafts_hold_as_many_tokens_as_those_for_decodes():
    settings = {**SETTINGS, "max_num_seqs": 512}
    runner = runner_of(LLM(EMBEDDED_MODEL, **settings, speculative_config={**NGRAM, "num_speculative_tokens": 7}))
    capture_with(runner, lambda function: function)
    assert runner.cuda_graphs.decode.sizes[-1] == 512
    assert runner.cuda_graphs.verification.sizes[-1] * 8 == 512


@pytest.mark.skipif(not has_numba(), reason="recordings are numba's")
@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "int8", "quantization": "int8"}, {"dtype": "bfloat16"}])
def test_what_a_model_computes_in_is_recorded_too(changes):
    eager = LLM(EMBEDDED_MODEL, **SETTINGS, **changes, enforce_eager=True)
    graphed = LLM(EMBEDDED_MODEL, **SETTINGS, **changes)
    assert tokens_of(graphed) == tokens_of(eager)
    assert runner_of(graphed).cuda_graphs.decode.replays > 10


def test_recordings_are_small_and_there_are_none_where_steps_differ(eager):
    if has_numba():
        graphs = runner_of(LLM(EMBEDDED_MODEL, **{**SETTINGS, "max_num_seqs": 64})).cuda_graphs.decode
        assert graphs.sizes == [1, 2, 4, 8]
    adapters = {"enable_lora": True, "max_lora_rank": 8}
    for changes in (adapters, {"attention_backend": "naive"}):
        assert runner_of(LLM(EMBEDDED_MODEL, **SETTINGS, **changes)).cuda_graphs.decode is None
    row = next(row for row in core_of(eager).ledger.rows if row.name == "CUDA graphs")
    assert row.bytes == 0


def gpu_engine(**changes) -> LLM:
    return LLM(EMBEDDED_MODEL, **{**SETTINGS, "device": "cuda", "dtype": "float32", **changes})


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_on_a_gpu_the_same_tokens_with_graphs(kv_cache_dtype):
    eager = gpu_engine(enforce_eager=True, kv_cache_dtype=kv_cache_dtype)
    graphed = gpu_engine(kv_cache_dtype=kv_cache_dtype)
    assert runner_of(eager).cuda_graphs.decode is None
    assert tokens_of(graphed) == tokens_of(eager)
    assert runner_of(graphed).cuda_graphs.decode.replays > 10


@pytest.mark.gpu
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_on_a_gpu_drafts_are_verified_in_graphs(async_scheduling):
    eager = gpu_engine(enforce_eager=True)
    graphed = gpu_engine(speculative_config=NGRAM, async_scheduling=async_scheduling)
    assert drafted_tokens_of(graphed) == drafted_tokens_of(eager)
    assert runner_of(graphed).cuda_graphs.verification.replays > 5


@pytest.mark.gpu
def test_on_a_gpu_a_replay_waits_for_nothing_and_allocates_nothing():
    graphs = runner_of(gpu_engine()).cuda_graphs.decode
    graphs.replay(step(3))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for num_rows in (1, 2, 3, 5, 6):
            graphs.replay(step(num_rows))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
