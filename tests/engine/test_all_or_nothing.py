"""A step is all or nothing: whatever is raised in one, and wherever, the engine gives right
answers afterwards.
"""

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from engine.mixed_requests import all_blocks_are_free, greedy_answers, run_out
from refusals import assert_refused

import minivllm.errors
from minivllm import LLM, MinivllmError, SamplingParams
from minivllm.config import EMBEDDED_DRAFT
from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.errors import NonFiniteLogitsError
from minivllm_lab.engines.inside import core_of

ENGINE = str(Path(minivllm.errors.__file__).parent)
HANDLERS = {
    "start_over", "_all_or_nothing", "_start_over", "_make_kv_cache_manager", "abort_request", "abort_requests",
    "_give_up",
}  # fmt: skip
LEFT_ALONE = ("/kernels/", "/platforms/interrupts.py")
"""In `InterruptsHeld` only a signal could raise anything, and it holds them."""
PREFIX = [*range(100, 140)]
PROMPTS = [[*PREFIX, 7 * index + 1, index + 3] for index in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SETTINGS = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 5, "max_num_batched_tokens": 40, "block_size": 8}


class Boom(BaseException):
    """An exception that, like a KeyboardInterrupt, no handler on the way catches."""


@contextmanager
def raising_at_line(line: int) -> Iterator[list[tuple[str, int]]]:
    """Raise when the engine has run `line` lines; yield a list of the lines that ran."""
    places: list[tuple[str, int]] = []

    def traced(frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(ENGINE) or any(part in name for part in LEFT_ALONE) or frame.f_code.co_name in HANDLERS:
            return None
        return of_line

    def of_line(frame, event, argument):
        if event == "line":
            places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(places) == line:
                sys.settrace(None)
                raise Boom(places[-1])
        return of_line

    sys.settrace(traced)
    try:
        yield places
    finally:
        sys.settrace(None)


@pytest.fixture(scope="module")
def llm():
    drafts = {"num_speculative_tokens": 3, "prompt_lookup_min": 1}
    return LLM(EMBEDDED_DRAFT, **SETTINGS, num_gpu_blocks_override=40, speculative_config=drafts)


@pytest.fixture(scope="module")
def expected():
    plain = LLM(EMBEDDED_DRAFT, **SETTINGS, num_gpu_blocks_override=200, enable_prefix_caching=False)
    return greedy_answers(plain, PROMPTS, 8)


def check(llm, expected):
    """Expect the usual tokens, every block free, and nothing left in front end or core."""
    assert greedy_answers(llm, PROMPTS, 8) == expected
    assert all_blocks_are_free(llm)
    assert not core_of(llm).scheduler.requests
    assert not llm.llm_engine.output_processor.states
    assert not llm.llm_engine._children


def generate_for_ever(llm, prompts, params):
    while True:
        llm.generate(prompts, params, use_tqdm=False)


def test_raised_at_many_places(llm, expected):
    """The exception is raised at source lines spread over the engine, each at one of the times that
    it runs.
    """
    check(llm, expected)
    assert llm.llm_engine.stats.spec_decoding_stats.num_accepted_tokens > 0
    with raising_at_line(-1) as places:
        greedy_answers(llm, PROMPTS, 8)
    times: dict[tuple[str, int], list[int]] = {}
    for line, place in enumerate(places, start=1):
        times.setdefault(place, []).append(line)
    chance, seen = random.Random(0), set()
    for place in sorted(times)[:: max(1, len(times) // 45)]:
        with raising_at_line(chance.choice(times[place])) as places, pytest.raises(Boom):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        seen.add(places[-1])
        check(llm, expected)
    assert len(seen) > 40, "the lines were to be many different ones"


@contextmanager
def leaning_on_ctrl_c(delay: float) -> Iterator[list[float]]:
    """Send SIGINT again and again after `delay` seconds until the block ends, interrupting only
    `LLM.generate`; yield a list with an entry for each.
    """
    sent: list[float] = []
    ended = threading.Event()

    def send():
        while not ended.wait(0.00005 if sent else delay):
            os.kill(os.getpid(), signal.SIGINT)
            sent.append(delay)

    def interrupt(*_):
        frame = sys._getframe()
        while frame := frame.f_back:
            if frame.f_code is LLM.generate.__code__:
                raise KeyboardInterrupt

    thread, before = threading.Thread(target=send), signal.signal(signal.SIGINT, interrupt)
    thread.start()
    try:
        yield sent
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_leaning_on_ctrl_c_does_not_cut_the_clean_up(llm, expected):
    check(llm, expected)
    delays, most = random.Random(2), 0
    for _ in range(15):
        with leaning_on_ctrl_c(delays.uniform(0.0, 0.05)) as sent, pytest.raises(KeyboardInterrupt):
            generate_for_ever(llm, PROMPTS, GREEDY)
        most = max(most, len(sent))
        check(llm, expected)
    assert most > 3


def test_interrupts_all_through_the_clean_up_wait_for_its_end(llm, expected, monkeypatch):
    """Two interrupts cut a step; two more come before and after each part of the clean-up."""
    core, engine = core_of(llm), llm.llm_engine
    cleaned = []

    def interrupts():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    def between_interrupts(owner, name):
        part = getattr(owner, name)

        def wrapped(*arguments):
            interrupts()
            result = part(*arguments)
            interrupts()
            cleaned.append(name)
            return result

        monkeypatch.setattr(owner, name, wrapped)

    check(llm, expected)
    for owner, name in (
        (core.scheduler, "start_over"),
        (core.executor, "collective_rpc"),
        (engine.output_processor, "abort_requests"),
        (engine.engine_core, "abort_requests"),
    ):
        between_interrupts(owner, name)
    monkeypatch.setattr(core.executor, "start_model", lambda _: interrupts())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert cleaned == ["start_over", "collective_rpc", "abort_requests", "abort_requests"]
    monkeypatch.undo()
    check(llm, expected)


def test_the_others_go_on_when_a_step_fails(llm, expected, monkeypatch):
    """Requests of the failed step end with an error that says why; waiting ones are served."""
    core = core_of(llm)
    for index, prompt in enumerate(PROMPTS):
        core.add_request(EngineCoreRequest(str(index), list(prompt), replace(GREEDY, seed=0), (), 0.0))
    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "start_model", mock.Mock(side_effect=RuntimeError("out of luck")))
        with pytest.raises(RuntimeError, match="out of luck"):
            core.step()
    outputs = run_out(core)
    failed = {output.request_id: output.error for output in outputs if output.finish_reason == "error"}
    assert failed == dict.fromkeys("01234", "RuntimeError: out of luck"), "the five that max_num_seqs lets in"
    assert [token for output in outputs for token in output.new_token_ids] == expected[5]
    check(llm, expected)


def test_a_step_without_memory_says_what_to_lower(llm, expected, monkeypatch):
    starved = mock.Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"))
    with monkeypatch.context() as patch:
        patch.setattr(core_of(llm).executor, "start_model", starved)
        assert_refused("max_num_batched_tokens", llm.generate, PROMPTS, GREEDY)
    check(llm, expected)


def test_only_those_with_broken_logits_end(llm, expected, monkeypatch):
    core = core_of(llm)
    start = core.executor.start_model

    def breaks_once(output):
        monkeypatch.undo()
        return SimpleNamespace(result=lambda: ModelRunnerOutput({}, nonfinite_req_ids=["1"]))

    monkeypatch.setattr(core.executor, "start_model", breaks_once)
    for index in range(3):
        core.add_request(EngineCoreRequest(str(index), list(PROMPTS[index]), replace(GREEDY, seed=0), (), 0.0))
    with pytest.raises(NonFiniteLogitsError):
        core.step()
    assert core.executor.start_model == start
    outputs, tokens = run_out(core), {"0": [], "1": [], "2": []}
    for output in outputs:
        tokens[output.request_id] += output.new_token_ids
    assert tokens == {"0": expected[0], "1": [], "2": expected[2]}
    assert [output.request_id for output in outputs if "NaN or infinite logits" in (output.error or "")] == ["1"]


def test_a_refusal_that_only_the_core_makes_comes_back_as_an_output(llm, expected):
    core = core_of(llm)
    for name, length in (("fits", 2), ("too long", core.scheduler.limits.max_model_len)):
        core.add_request(EngineCoreRequest(name, [1] * length, replace(GREEDY, seed=0), (), 0.0))
    outputs = run_out(core)
    [refused] = [output for output in outputs if output.error]
    assert (refused.request_id, refused.invalid_request) == ("too long", True)
    assert f"a prompt may have {core.scheduler.limits.max_model_len - 1}" in refused.error


def test_one_call_at_a_time(llm, expected, monkeypatch):
    """A second call, from a signal handler or another thread, is refused before its first step."""
    said, step = [], llm.llm_engine.step

    def intrude(*_):
        try:
            llm.generate([[1]], GREEDY)
        except MinivllmError as error:
            said.append(str(error))

    def intrude_from_a_handler():
        before = signal.signal(signal.SIGALRM, intrude)
        signal.raise_signal(signal.SIGALRM)
        signal.signal(signal.SIGALRM, before)

    def intrude_from_a_thread():
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join(10)

    intruders = [intrude_from_a_thread, intrude_from_a_handler]

    def intruded_step():
        if intruders:
            intruders.pop()()
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", intruded_step)
    check(llm, expected)
    assert [text.split(":")[0] for text in said] == ["this LLM is in the middle of another call"] * 2


def test_a_fork_is_refused(llm):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[1]], GREEDY)
        except MinivllmError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"of which this one is a fork" in os.read(reader, 1000)
