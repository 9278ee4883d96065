"""Test the number of drafts in a step, which follows a schedule of batch sizes."""

import pytest

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput


def test_a_batch_size_beyond_a_range_counts_as_its_last_one_and_no_draft_is_longer_than_allowed():
    schedule = [(1, 4, 5), (8, 15, 3), (16, 20, 0)]
    drafting = DraftingConfig(num_speculative_tokens=4, num_speculative_tokens_per_batch_size=schedule)
    scheduler = Scheduler(SchedulerConfig(max_model_len=64, drafting=drafting), CacheConfig(num_gpu_blocks=8))
    results = [scheduler.drafting.num_drafts_after(size) for size in (1, 4, 7, 8, 15, 16, 20, 300)]
    assert results == [4, 4, 4, 3, 3, 0, 0, 0]


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_the_worker_is_told_how_many_drafts_to_make_and_that_many_places_are_kept(scheduler_class):
    ahead = scheduler_class is AsyncScheduler
    config = SchedulerConfig(
        max_model_len=64, async_scheduling=ahead,
        drafting=DraftingConfig(
            num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[(1, 1, 3), (2, 2, 1), (3, 3, 0)]
        ),
    )  # fmt: skip
    scheduler = scheduler_class(config, CacheConfig(num_gpu_blocks=64, block_size=4))
    told = []
    for name in "abc":
        scheduler.add_request(Request(name, [1, 2, 3, 4], max_tokens=40))
        output = scheduler.schedule()
        told.append(output.num_spec_tokens_to_schedule)
        drafts = {request: [-1] * told[-1] for request in output.num_scheduled_tokens if told[-1]}
        sampled = {request: [7] for request in output.num_scheduled_tokens}
        invalid = {request: len(theirs) for request, theirs in output.scheduled_spec_decode_tokens.items()}
        scheduler.update_from_output(output, ModelRunnerOutput(sampled, num_invalid_spec_tokens=invalid))
        if not ahead:
            scheduler.update_draft_token_ids(drafts)
        places = {name: len(request.spec_token_ids) for name, request in scheduler.requests.items()}
        assert places == dict.fromkeys(places, told[-1])
    assert told == [3, 1, 0]
