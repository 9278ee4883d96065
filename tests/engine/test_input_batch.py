"""Test that the persistent batch agrees with the scheduler's own state after any sequence of steps."""

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import InputBatch

REQUESTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=6
)  # tokens of the prompt, tokens to generate, step of arrival


def check_step(
    scheduler: Scheduler, batch: InputBatch, scheduled: dict[str, int], drafts: dict[str, list[int]]
) -> None:
    """Compare every input of the step with its plain definition, token by token."""
    inputs = batch.prepare(scheduled, drafts)
    logits_indices = []
    size = batch.block_size
    at = 0
    for index, (req_id, count) in enumerate(scheduled.items()):
        request = scheduler.requests[req_id]
        table = scheduler.kv_cache_manager.get_block_ids(req_id)
        start = request.num_computed_tokens - count  # the scheduler has counted them already
        assert inputs.query_start_loc[index] == at
        assert inputs.seq_lens[index] == request.num_computed_tokens
        token_ids = [*request.all_token_ids, *drafts.get(req_id, ())]
        for position in range(start, start + count):
            assert inputs.input_ids[at] == token_ids[position]
            assert inputs.positions[at] == position
            assert inputs.slot_mapping[at] == table[position // size] * size + position % size
            if position >= request.num_tokens - 1:
                logits_indices.append(at)
            at += 1
        row = inputs.block_table[index].tolist()
        assert row[: len(table)] == table[: len(row)]
        assert not any(row[len(table) :]), "a table is padded with the null block"
        assert (index in inputs.sampling) == (request.num_computed_tokens == len(token_ids))
    assert inputs.logits_indices.tolist() == logits_indices, "behind the last known token and behind every draft"
    assert inputs.num_sampled.sum() == len(logits_indices)
    assert inputs.query_start_loc[-1] == at == len(inputs.input_ids)
    assert len(set(inputs.slot_mapping.tolist())) == at, "two tokens of a step never share a slot"


@given(
    REQUESTS, st.sampled_from([1, 4, 16]), st.integers(3, 24), st.integers(1, 4), st.booleans(),
    st.sets(st.integers(0, 12), max_size=3), st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_inputs_are_what_the_scheduler_decided(requests, block_size, budget, max_num_seqs, caching, abort_steps, k):
    num_blocks = -(-48 // block_size) + 2  # tight: several requests must preempt one another
    limits = {"max_model_len": 64, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    config = SchedulerConfig(**limits, drafting=DraftingConfig(num_speculative_tokens=k))
    cache = CacheConfig(num_gpu_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching)
    scheduler = Scheduler(config, cache)
    batch = InputBatch(max_num_seqs, config.max_model_len, block_size)
    step = 0
    while scheduler.has_unfinished_requests() or step <= 6:
        for index, (length, max_tokens, arrival) in enumerate(requests):
            if arrival == step:
                prompt = [1 + (index // 2 + position) % 7 for position in range(length)]  # some prompts are alike
                params = SamplingParams(seed=index, max_tokens=max_tokens)
                scheduler.add_request(Request(str(index), prompt, max_tokens=max_tokens, sampling_params=params))
        if step in abort_steps and scheduler.running:
            scheduler.finish_requests([scheduler.running[0].request_id], RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        batch.update(output)
        sampled = {}
        if output.num_scheduled_tokens:
            drafts = output.scheduled_spec_decode_tokens
            check_step(scheduler, batch, output.num_scheduled_tokens, drafts)
            inputs = batch.prepare(output.num_scheduled_tokens, drafts)
            for index in inputs.sampling:
                req_id = inputs.req_ids[index]
                accepted = drafts.get(req_id, [])[: (step + index) % 4]
                sampled[req_id] = [*accepted, (step + int(index)) % 7 + 1]
            batch.append_tokens(inputs.rows[inputs.sampling], list(sampled.values()))
        scheduler.update_from_output(output, ModelRunnerOutput(sampled))
        scheduler.update_draft_token_ids({req_id: [step % 7 + 1] * (step % (k + 1)) for req_id in sampled})
        step += 1
        assert step < 2000
    batch.update(scheduler.schedule())
    assert not batch.row_of
    assert not batch.block_table.any()
    assert sorted(batch._free_rows) == list(range(max_num_seqs))
