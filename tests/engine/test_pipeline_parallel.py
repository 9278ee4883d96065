"""`pipeline_parallel_size`: the tokens of one rank, layers and cache divided, and an exception on
any rank.

One engine of two stages serves most of these tests; to change what is scheduled, they give it
another scheduler.
"""

import pytest
from engine.golden_adapters import EXPECTED, PROMPT, request
from engine.mixed_requests import GREEDY, PROMPTS, SHARED, WISHES, completions_of, greedy_answers, reschedule
from executor.failing_worker import failing_worker_of_rank
from executor.test_rank_processes import have_ended, pids_of

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import WorkerFailedError
from minivllm.memory import kv_bytes_per_token
from minivllm.models.pipeline import get_pp_indices
from minivllm_lab.engines.inside import core_of

pytestmark = pytest.mark.usefixtures("warm_processes")

SETTINGS = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def llm():
    """Start two stages of one rank each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minivllm.executor.multiproc_executor.worker_of_rank", failing_worker_of_rank)
        adapters = {"enable_lora": True, "max_loras": 2}
        llm = LLM(EMBEDDED_MODEL, **SETTINGS, **adapters, pipeline_parallel_size=2)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def expected():
    """Return the tokens of one rank."""
    return completions_of(LLM(EMBEDDED_MODEL, **SETTINGS))


@pytest.mark.parametrize(("budget", "num_blocks"), [(2048, None), (24, 11)])
def test_the_tokens_of_one_rank(llm, expected, budget, num_blocks):
    reschedule(llm, budget, num_blocks)
    assert completions_of(llm) == expected
    assert completions_of(llm) == expected, "with what the first run left in the prefix cache"
    assert (llm.llm_engine.stats.num_preemptions > 0) == bool(num_blocks)


def test_each_stage_has_the_adapters_of_its_own_layers(llm):
    reschedule(llm, 24)
    names = ["a", "b", "c", None] * 2
    answers = greedy_answers(llm, [PROMPT] * len(names), 8, lora_request=[request(name) for name in names])
    assert answers == [EXPECTED[name] for name in names]


@pytest.mark.parametrize(("place", "rank"), [("before", 1), ("in the layers", 0), ("after", 1)])
def test_an_exception_on_any_stage_ends_the_step_and_not_the_engine(llm, expected, place, rank):
    reschedule(llm, 24)
    core = core_of(llm)
    pids = pids_of(core.executor.ranks)
    core.executor.collective_rpc("fail_in", place, [rank])
    with pytest.raises(WorkerFailedError, match=rf"^rank {rank} of 2: KeyError"):
        llm.generate(PROMPTS, WISHES, use_tqdm=False)
    assert completions_of(llm) == expected
    assert pids_of(core.executor.ranks) == pids
    assert not have_ended(pids, 0.0)


def test_each_stage_has_its_layers_of_the_cache(llm):
    core = core_of(llm)
    layers = core.model_config.num_hidden_layers
    assert core.ledger.bytes_per_token == kv_bytes_per_token(core.model_config, "float32") * -(-layers // 2) // layers


def test_while_one_group_of_requests_is_on_a_stage_another_is_on_the_next(llm, monkeypatch):
    """Six prompts, too many for one step, make two groups of requests that take turns."""
    reschedule(llm, 120)
    core, in_flight = core_of(llm), []
    assert core.reset_prefix_cache(), "with their prefixes cached, all would fit into one step"
    start = core.executor.start_model

    def counted(scheduler_output):
        if scheduler_output.num_scheduled_tokens:
            in_flight.append(1 + sum(bool(batch.scheduler_output.num_scheduled_tokens) for batch in core.batch_queue))
        return start(scheduler_output)

    monkeypatch.setattr(core.executor, "start_model", counted)
    llm.generate([[number, *SHARED] for number in range(6)], GREEDY, use_tqdm=False)
    assert in_flight.count(2) > 0.8 * len(in_flight)


def test_two_ranks_in_each_of_two_stages(request, expected):
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, tensor_parallel_size=2, pipeline_parallel_size=2, max_num_batched_tokens=24)
    request.addfinalizer(llm.shutdown)
    assert completions_of(llm) == expected
    assert core_of(llm).executor.ranks.size == 4


def test_layers_by_stage():
    """The last stage also computes the head, so leftover layers go to the stages before it."""
    for layers, stages, sizes in ((4, 2, [2, 2]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2]), (5, 5, [1] * 5), (6, 1, [6])):
        bounds = [get_pp_indices(layers, rank, stages) for rank in range(stages)]
        assert [end - start for start, end in bounds] == sizes
        assert [start for start, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
