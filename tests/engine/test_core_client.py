"""The seam between front end and core: a core in its own process gives the same answers, and its
end is reported clearly.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from engine.mixed_requests import run_out
from engine.test_all_or_nothing import generate_for_ever, leaning_on_ctrl_c
from patience import PATIENCE, eventually
from refusals import assert_refused
from warm_processes import WarmSubprocess

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import EngineDeadError
from minivllm_lab.engines.inside import core_of

pytestmark = pytest.mark.usefixtures("warm_processes")

SETTINGS = {
    "device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 12,
    "max_num_batched_tokens": 16, "speculative_config": {"num_speculative_tokens": 3}, "kv_cache_dtype": "int8",
    "scheduling_policy": "priority",
}  # fmt: skip
PROMPTS = ["import os\n", "def add(a, b):\n", "class Node:\n", "for name in", "import os\nimport sys\n", "x ="] * 2
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, n=2, seed=1, max_tokens=12, stop=["\n"], logit_bias={5: 1.0}, bad_words=["self"]),
    SamplingParams(temperature=0.0, max_tokens=12, min_tokens=3, repetition_penalty=1.3, stop_token_ids=[7]),
    SamplingParams(temperature=1.2, top_p=0.8, top_k=50, min_p=0.01, seed=9, max_tokens=12, allowed_token_ids=range(9)),
    SamplingParams(
        temperature=1.0, seed=4, max_tokens=12, structured_outputs=StructuredOutputsParams(json_object=True)
    ),
] * 2


@pytest.fixture(scope="module")
def apart():
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, multiprocess=True)
    yield llm
    llm.shutdown()


def answers(llm):
    outputs = llm.generate(PROMPTS, PARAMS, priority=[*range(6)] * 2)
    for output in outputs:
        output.metrics = output.request_id = None
    return outputs


def test_the_same_answers_from_a_process(apart):
    """Drafts, an int8 cache, chunks, priorities and preemptions cross the seam too."""
    here = LLM(EMBEDDED_MODEL, **SETTINGS)
    assert here.llm_engine.engine_core.ready == apart.llm_engine.engine_core.ready
    assert answers(here) == answers(apart)
    for stats in (here.llm_engine.stats, apart.llm_engine.stats):  # which requests share a step depends on the clock
        assert 0 < stats.spec_decoding_stats.num_accepted_tokens <= stats.spec_decoding_stats.num_draft_tokens
        assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (0, 0, 0.0)
    assert apart.reset_prefix_cache()


def test_looking_inside_is_refused(apart):
    assert_refused("in another process", core_of, apart)


def test_leaning_on_ctrl_c_leaves_no_message_half_sent_or_half_read(apart):
    """Ctrl-C reaches the core too, which ignores it; the next call gets its own answers."""
    [expected] = apart.generate(PROMPTS[:1], PARAMS[0])
    for index in range(10):
        with leaning_on_ctrl_c(0.006 * index), pytest.raises(KeyboardInterrupt):
            generate_for_ever(apart, PROMPTS, PARAMS[0])
        os.kill(apart.llm_engine.engine_core.cores.processes[0].pid, signal.SIGINT)
        assert apart.generate(PROMPTS[:1], PARAMS[0])[0].outputs == expected.outputs
        assert not apart.llm_engine._children


@pytest.mark.parametrize("n", [1, 2])
def test_outputs_of_an_aborted_request_never_reach_the_next_of_that_id(apart, n):
    """Some outputs of the first request are still on the socket, including its last one if it has
    finished meanwhile.
    """
    engine = apart.llm_engine
    first = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, n=n, seed=0)
    second = SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True, n=n, seed=0)
    [expected] = apart.generate(PROMPTS[1:2], second)
    for seconds in (0.0, 0.02, 0.5):
        engine.add_request("a", PROMPTS[0], first)
        engine.step()
        time.sleep(seconds)
        engine.abort_request(["a"])
        engine.add_request("a", PROMPTS[1], second)
        seen = run_out(engine)
        assert {(output.request_id, output.prompt) for output in seen} == {("a", PROMPTS[1])}
        assert seen[-1].outputs == expected.outputs


def test_what_cannot_start_is_told_in_one_line(capfd):
    before = children()
    few = SETTINGS | {"num_gpu_blocks_override": 3}
    assert_refused("one request of max_model_len = 128 tokens", LLM, EMBEDDED_MODEL, **few, multiprocess=True)
    assert "Traceback" not in capfd.readouterr().err
    assert children() == before


def test_nothing_is_left_when_the_front_end_is_killed(template, tmp_path):
    """Both processes are forked, where that is possible."""
    forked = "import warm_template; warm_template.fork_from_here()" if template else ""
    code = (
        f"{forked}\n"
        "import sys; from minivllm import LLM; from minivllm.config import EMBEDDED_MODEL\n"
        f"llm = LLM(EMBEDDED_MODEL, **{SETTINGS}, multiprocess=True)\n"
        "print(llm.llm_engine.engine_core.cores.processes[0].pid, flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    start = WarmSubprocess(template).Popen if template else subprocess.Popen
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
    front_end = start([sys.executable, "-c", code], **pipes)
    assert front_end.stdout is not None
    with front_end.stdin, front_end.stdout:
        pid = int(front_end.stdout.readline())
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        front_end.kill()
        front_end.wait()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert not alive
    assert eventually(lambda: not list(tmp_path.glob("minivllm-*")))


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True) if process.is_running()}


def test_nothing_is_dropped_while_the_core_is_held_up(apart):
    """More requests arrive than a socket buffers by default, as during a first step that compiles."""
    engine, all_sent = apart.llm_engine, []
    prompts = [{"prompt_token_ids": [1 + index % 99], "cache_salt": "x" * 2000} for index in range(1500)]
    core = engine.engine_core.cores.processes[0]

    def go_on_when_all_are_sent():
        all_sent.append(eventually(lambda: len(engine.output_processor.states) == len(prompts), 10.0, pause=0.01))
        os.kill(core.pid, signal.SIGCONT)

    os.kill(core.pid, signal.SIGSTOP)
    threading.Thread(target=go_on_when_all_are_sent).start()
    outputs = apart.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
    assert all_sent == [True], "none had to wait for the core"
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]


def test_a_killed_core_is_told_at_once(apart):
    """This test runs last, because it kills the core that the others use."""
    threading.Timer(0.2, apart.llm_engine.engine_core.cores.processes[0].kill).start()
    with pytest.raises(EngineDeadError, match=r"killed by SIGKILL"):
        generate_for_ever(apart, PROMPTS, PARAMS[0])
    with pytest.raises(EngineDeadError):
        apart.generate("again", PARAMS[0])
