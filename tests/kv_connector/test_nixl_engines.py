"""Two whole engines with the real NIXL: one in its own process prefills, one here decodes."""

import json
import random
from pathlib import Path

import pytest
from kv_connector.pull_doubles import TO_DECODE
from patience import eventually
from refusals import assert_refused
from server.serving import free_port

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm_lab.engines.inside import core_of

VLLM = json.loads((Path(__file__).parent / "data" / "pd_nixl.json").read_text())
"""What two servers of vLLM 0.32.0 with its NixlConnector answered for the same model."""
SIZES = {"max_model_len": 512, "num_gpu_blocks_override": 160, "block_size": 16, "max_num_batched_tokens": 128}
LEASE = 5.0

pytestmark = [pytest.mark.nixl, pytest.mark.usefixtures("warm_processes")]


def engine(name: str, role: str, **others) -> LLM:
    """Start an engine with a side channel of its own."""
    settings = {
        "kv_connector": "NixlConnector",
        "engine_id": name,
        "kv_role": role,
        "kv_connector_extra_config": {"kv_lease_duration": LEASE, "handshake_timeout": 1.0},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        patch.setenv("UCX_TLS", "sm,tcp,self")
        return LLM(EMBEDDED_MODEL, kv_transfer_config=settings, **SIZES | others)


@pytest.fixture(scope="module")
def plain():
    return LLM(EMBEDDED_MODEL, **SIZES)


@pytest.fixture(scope="module")
def started():
    """Collect the prefill engines of these tests: one, and another after that one was killed."""
    engines = []
    yield engines
    for llm in engines:
        llm.shutdown()


@pytest.fixture
def p(started):
    if not started:
        started.append(engine("P", "kv_producer", multiprocess=True))
    return started[-1]


@pytest.fixture(scope="module")
def d():
    llm = engine("D", "kv_consumer")
    ask(llm, [[1, 2, 3]], [None], 2)  # what is compiled takes its time, in which no heartbeat is sent
    yield llm
    core_of(llm).shutdown()


def ask(llm: LLM, prompts: list[list[int]], params: list[dict | None], max_tokens: int = 16):
    """Answer prompts greedily with these kv_transfer_params."""
    wishes = [
        SamplingParams(
            temperature=0.0, max_tokens=max_tokens, extra_args=None if told is None else {"kv_transfer_params": told}
        )
        for told in params
    ]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wishes)


def prefilled(p: LLM, prompts: list[list[int]]) -> list[dict]:
    return [out.kv_transfer_params for out in ask(p, prompts, [TO_DECODE] * len(prompts), 1)]


def tokens(outputs) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in outputs]


def all_are_free(llm: LLM) -> bool:
    """Return whether no request holds a block, here or in another process; if so, clear the prefix
    cache.
    """
    return llm.reset_prefix_cache()


def test_vllms_prompt_and_vllms_tokens(p, d):
    prompt = VLLM["P"]["prompt_token_ids"]
    (params,) = prefilled(p, [prompt])
    theirs = VLLM["P"]["kv_transfer_params"]
    assert set(params) - set(theirs) == {"remote_registration_generation", "remote_prompt_digest"}
    assert set(theirs) <= set(params)
    own = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    assert {key: params[key] for key in theirs if key not in own} == {
        key: value for key, value in theirs.items() if key not in own
    }
    (answer,) = ask(d, [prompt], [params])
    assert tokens([answer]) == [VLLM["D"]["token_ids"]]
    assert core_of(d).scheduler.make_stats().connector_prefix_cache_stats.hits >= 473


def test_random_prompts_with_shared_beginnings(p, d, plain):
    draw = random.Random(0)
    numbers = [draw.randrange(900) for _ in range(2000)]
    lengths = [(draw.choice((0, 16, 40, 100)), draw.choice((1, 15, 16, 17, 90))) for _ in range(10)]
    prompts = [numbers[:shared] + numbers[100 * at : 100 * at + own] for at, (shared, own) in enumerate(lengths, 2)]
    answers = ask(d, prompts, prefilled(p, prompts), 8)
    assert tokens(answers) == tokens(ask(plain, prompts, [None] * len(prompts), 8))
    assert eventually(lambda: all_are_free(p), LEASE - 1)  # told, not expired


def test_a_prompt_of_less_than_a_block(p, d):
    prompt = VLLM["short P"]["prompt_token_ids"]
    (params,) = prefilled(p, [prompt])
    assert len(params["remote_block_ids"][0]) == 1
    assert tokens(ask(d, [prompt], [params], 1)) == [VLLM["short P"]["token_ids"]]


def test_params_that_kill_vllms_engine_are_an_error_of_that_request(d):
    for wrong in ({"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_block_ids": "x"}):
        assert_refused("kv_transfer_params", ask, d, [[1, 2, 3]], [wrong])
    assert tokens(ask(d, [[1, 2, 3]], [None], 4))


def test_a_prefill_engine_that_is_killed(p, d, plain, started):
    prompts = [list(range(300, 380)), list(range(400, 480))]
    params = prefilled(p, prompts)
    p.llm_engine.engine_core.cores.processes[0].kill()
    started.clear()
    assert_refused("could not be loaded", ask, d, prompts[:1], params[:1])
    remote = core_of(d).scheduler.remote
    remote.recomputes = True
    assert tokens(ask(d, prompts[1:], params[1:], 4)) == tokens(ask(plain, prompts[1:], [None], 4))
    assert core_of(d).scheduler.kv_cache_manager.usage == 0
