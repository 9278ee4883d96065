"""Which core gets a request: vLLM's rule, the prompt's beginning, and who is told what."""

import pytest

from minivllm import SamplingParams
from minivllm.core.limits import RequestLimits
from minivllm.core.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreReady, EngineCoreRequest
from minivllm.core.stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats, summed_stats
from minivllm.engine.core_proc import OutputRouter
from minivllm.engine.load_balancing import PREFIX_SLACK, LoadBalancer
from minivllm.errors import MinivllmError


def stats(waiting: int = 0, running: int = 0, usage: float = 0.0) -> SchedulerStats:
    return SchedulerStats(running, waiting, usage, PrefixCacheStats(requests=1), SpecDecodingStats(1, 2, 1, [1]), 1)


def balancer(cores: int, routing: str = "load", blocks: int = 100, **client: int) -> LoadBalancer:
    ready = EngineCoreReady(RequestLimits(512, 4, blocks - 1), blocks, None, stats())
    return LoadBalancer([ready] * cores, routing, **client)


def request(prompt: list[int] | None = None, **settings) -> EngineCoreRequest:
    return EngineCoreRequest("r", prompt or [1, 2, 3], SamplingParams(), (0,), 0.0, **settings)


@pytest.mark.parametrize(
    ("counts", "chosen"),
    [
        ([(0, 5), (1, 0)], 1),  # four points for the one that waits, five for those that run
        ([(0, 4), (1, 0)], 0),  # equal: the first
        ([(2, 0), (1, 3), (0, 6)], 2),
        ([(0, 0), (0, 0)], 0),
    ],
)
def test_a_waiting_request_counts_as_four_that_run(counts, chosen):
    cores = balancer(len(counts))
    for rank, (waiting, running) in enumerate(counts):
        cores.observe(rank, stats(waiting, running), 0)
    assert cores.choose(request()) == chosen


def test_what_was_sent_counts_until_the_core_has_counted_it():
    cores = balancer(2)
    assert [cores.choose(request()) for _ in range(4)] == [0, 1, 0, 1]
    cores.observe(0, stats(running=1), num_received=1)  # of two: the second is still under way
    assert (cores.score(0), cores.score(1)) == (5, 8)
    cores.observe(0, stats(running=2), num_received=2)
    assert cores.score(0) == 2


def test_several_clients_begin_with_different_cores_and_expect_the_others_to_send_as_much():
    first, second = (balancer(2, client_index=index, client_count=2) for index in range(2))
    assert (first.choose(request()), second.choose(request())) == (0, 1)
    assert first.score(0) == 2 * 4


def test_a_core_that_has_ended_gets_nothing_more():
    cores = balancer(2)
    cores.drop(0)
    assert {cores.choose(request()) for _ in range(5)} == {1}
    with pytest.raises(MinivllmError, match=r"running cores are \[1\]"):
        cores.choose(request(data_parallel_rank=0))
    with pytest.raises(MinivllmError, match="data_parallel_rank 2"):
        cores.choose(request(data_parallel_rank=2))
    assert cores.choose(request(data_parallel_rank=1)) == 1


SHARED = list(range(40))


def test_a_prompt_follows_its_beginning_unless_that_core_is_much_more_loaded():
    cores = balancer(2, "prefix")
    cores.observe(0, stats(running=1), 0)
    assert cores.choose(request([*SHARED, 1])) == 1
    cores.observe(1, stats(running=PREFIX_SLACK + 1), 1)
    assert cores.choose(request([*SHARED, 2])) == 1, "at the bound"
    assert cores.choose(request([*range(100, 140)])) == 0, "nobody has this one"
    cores.observe(1, stats(running=PREFIX_SLACK + 6), 2)
    assert cores.choose(request([*SHARED, 3])) == 0, "beyond the bound"


def test_load_alone_does_not_look_at_prompts():
    cores = balancer(2)
    assert [cores.choose(request(SHARED)) for _ in range(2)] == [0, 1]


def test_the_longest_beginning_wins_and_salts_keep_apart():
    cores = balancer(3, "prefix")
    cores.choose(request(SHARED[:8]))  # core 0: two blocks
    cores.observe(0, stats(running=PREFIX_SLACK), 1)
    assert cores.choose(request([*SHARED[:4], *[7] * 20])) == 0, "one block is more than none"
    cores.observe(0, stats(running=2), 2)
    cores.observe(1, stats(running=1), 0)
    assert cores.choose(request(SHARED, cache_salt="mine")) == 2
    assert cores.choose(request(SHARED)) == 0


def test_no_more_blocks_are_remembered_than_a_cache_holds_and_none_after_a_reset():
    cores = balancer(2, "prefix", blocks=10)
    assert cores.choose(request(SHARED)) == 0
    cores.observe(0, stats(running=1), 1)
    assert cores.choose(request(SHARED)) == 0
    cores.observe(0, stats(running=1), 2)
    cores.choose(request([*range(100, 140)], data_parallel_rank=0))
    cores.observe(0, stats(running=1), 3)
    assert cores.choose(request(SHARED)) == 1, "its blocks have been replaced"
    cores.observe(1, stats(running=2), 1)
    cores.forget_blocks()
    assert cores.choose(request(SHARED)) == 0


def outputs(*request_ids: str, state: SchedulerStats | None = None) -> EngineCoreOutputs:
    found = [EngineCoreOutput(request_id, [1], finish_reason="stop") for request_id in request_ids]
    return EngineCoreOutputs(found, state or stats(), scheduled_req_ids=list(request_ids))


def test_each_client_gets_its_own_outputs_and_all_get_the_counts():
    router = OutputRouter(rank=3, client_count=2)
    for client, name in ((0, "a"), (1, "b"), (1, "c")):
        router.note_added(client, name)
    told = dict(router.shares(outputs("a", "b")))
    assert {client: [one.request_id for one in share.outputs] for client, share in told.items()} == {0: ["a"], 1: ["b"]}
    assert [told[client].num_received for client in (0, 1)] == [1, 2]
    assert {share.engine_index for share in told.values()} == {3}
    told = dict(router.shares(outputs("c")))
    assert list(told) == [1], "the state is as the first client knows it"
    told = dict(router.shares(outputs(state=stats(waiting=1))))
    assert list(told) == [0, 1]
    silent = outputs(state=stats(waiting=1))
    silent.step_events = [b"{}"]
    assert list(dict(router.shares(silent))) == [0, 1], "a line that one misses, its x-ray lacks for good"
    router.note_added(0, "d")
    router.note_aborted(["d"])
    assert not any(share.outputs for _, share in router.shares(outputs("d", state=stats(running=9))))


def test_the_state_of_several_cores_as_one():
    assert summed_stats([stats(1, 2, 0.5)]) == stats(1, 2, 0.5)
    both = summed_stats([stats(1, 2, 0.5), stats(3, 4, 0.1)])
    assert (both.num_waiting_reqs, both.num_running_reqs, both.kv_cache_usage) == (4, 6, 0.3)
    assert both.prefix_cache_stats == PrefixCacheStats(requests=2)
    assert both.spec_decoding_stats == SpecDecodingStats(2, 4, 2, [2])
    assert stats(1, 2, 0.5).idle() == stats()
