"""Test that an engine's warm-up leaves nothing behind, and leaves nothing to compile."""

import random

import pytest

from minivllm.config import EMBEDDED_MODEL, Parts
from minivllm.entrypoints.llm import LLM
from minivllm.kernels.rejection_sample import rejection_sample
from minivllm.sampling_params import SamplingParams
from minivllm.worker.kernel_warmup import BEHIND_A_CONTEXT, warm_up_steps
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer
from minivllm_lab.engines.inside import core_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
DRAFT_MODEL = {"method": "draft_model", "model": str(EMBEDDED_MODEL), "num_speculative_tokens": 3}
LIMITS = [(2048, 256, 4096), (2048, 4, 200), (16, 4, 200), (1, 1, 2), (8192, 2, 131072), (300, 300, 20)]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_step_keeps_the_limits_and_the_next_one_forgets_it(limits, drafts):
    max_num_batched_tokens, max_num_seqs, max_model_len = limits
    running = set()
    for step in warm_up_steps(*limits, 16, drafts, 40):
        assert step.finished_req_ids <= running
        running -= step.finished_req_ids
        for request in step.scheduled_new_reqs:
            known = len(request.prefill_token_ids)
            assert known < max_model_len
            assert len(request.block_ids) * 16 > known
            most = max(request.block_ids)
            assert most == (min(len(request.block_ids), 40) - 1 if request.num_computed_tokens else 0)
            assert request.num_computed_tokens + step.num_scheduled_tokens[request.req_id] == known
            running.add(request.req_id)
        assert len(running) <= max_num_seqs
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values()) <= max_num_batched_tokens
        assert set(step.num_scheduled_tokens) <= running
    assert not running


def test_all_sizes_of_steps_are_met_and_contexts_as_long_as_they_get():
    steps = list(warm_up_steps(2048, 256, 4096, 16, 5))
    whole = [step for step in steps if all(req.num_computed_tokens == 0 for req in step.scheduled_new_reqs)]
    totals = [step.total_num_scheduled_tokens for step in whole if step.scheduled_new_reqs]
    assert totals[:12] == [1 << bit for bit in range(12)]
    behind = [step for step in steps if any(req.num_computed_tokens for req in step.scheduled_new_reqs)]
    assert tuple(step.total_num_scheduled_tokens for step in behind) == BEHIND_A_CONTEXT
    assert {len(step.scheduled_new_reqs[0].prefill_token_ids) for step in behind} == {4096 - 1}
    verified = [step.scheduled_spec_decode_tokens.values() for step in steps if step.scheduled_spec_decode_tokens]
    assert [[len(each) for each in drafts] for drafts in verified] == [[1], [2], [4]], "rows of 2, 4, 8 in the kernel"
    assert [step.total_num_scheduled_tokens for step in warm_up_steps(2, 1, 3, 16)] == [1, 2, 1, 0]


OPTIONS = [
    {"kv_cache_dtype": "int8", "quantization": "int8"},
    {"speculative_config": NGRAM, "async_scheduling": True},
    {"speculative_config": DRAFT_MODEL},
    {"enable_lora": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_leaves_nothing_behind(options, monkeypatch):
    """The warm-up steps of a GPU are run here on a CPU."""
    llm = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=200, max_num_seqs=4, num_gpu_blocks_override=20, **options)
    params = SamplingParams(max_tokens=8, temperature=1, seed=3, ignore_eos=True)
    expected = llm.generate("def f", params, use_tqdm=False)[0].outputs[0].token_ids
    assert llm.reset_prefix_cache()
    worker = core_of(llm).executor.worker
    worker.runner.reset()
    verified = []
    noted = lambda step: verified.append(step) or rejection_sample(step)  # noqa: E731
    monkeypatch.setattr("minivllm.worker.worker.rejection_sample", noted)
    worker.run_unobserved(warm_up_steps(256, 4, 200, 16, 2 if "speculative_config" in options else 0, 20))
    assert len(verified) == (2 if "speculative_config" in options else 0)
    assert not worker.runner.batch.row_of
    assert not worker.runner.draft_tokens_handler.take()
    assert llm.generate("def f", params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_parts_are_not_asked_before_the_first_request():
    """Parts may be a learner's: unfinished, and slow with long prompts."""
    asked = []

    class Asking(NgramProposer):
        def propose(self, batch, rows):
            asked.append(rows)
            return super().propose(batch, rows)

    parts = Parts(draft_proposer=Asking, rejection_sample=lambda step: asked.append(step) or rejection_sample(step))
    options = {"max_model_len": 200, "max_num_seqs": 4, "num_gpu_blocks_override": 20, "speculative_config": NGRAM}
    llm = LLM(EMBEDDED_MODEL, device="cpu", parts=parts, **options)
    core_of(llm).executor.worker.run_unobserved(warm_up_steps(256, 4, 200, 16, 2))
    assert not asked
    llm.generate("def f", SamplingParams(max_tokens=2), use_tqdm=False)
    assert asked


GPU_OPTIONS = [
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8", "quantization": "int8"},
    {"dtype": "bfloat16", "speculative_config": NGRAM},
    {"dtype": "bfloat16", "enforce_eager": True},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=str)
def test_on_a_gpu_no_request_waits_for_the_compiler(options, monkeypatch):
    """Requests are long, short, many, drafted for, sampled, or cut into chunks."""
    import triton

    llm = LLM(EMBEDDED_MODEL, device="cuda", max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=512, **options)
    compiled = []

    def note(**launch) -> bool:
        compiled.append(launch["repr"])
        return False

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    draw = random.Random(0)
    for _ in range(20):
        count, longest = draw.choice([1, 2, 5, 16, 40]), draw.choice([4, 60, 700, 1900])
        prompts = [[draw.randrange(1, 4000) for _ in range(draw.randint(1, longest))] for _ in range(count)]
        params = SamplingParams(temperature=draw.choice([0.0, 1.0]), max_tokens=draw.randint(1, 12), ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    assert not compiled
