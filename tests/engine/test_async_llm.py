"""The engine for an event loop, with its core in a process or a thread: the same answers, readers
that leave, and shutdown.
"""

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import psutil
import pytest
from patience import eventually

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, Parts
from minivllm.core.block_pool import BlockPool
from minivllm.core.policy import SchedulingPolicy
from minivllm.engine import async_llm
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM, RequestOutputCollector
from minivllm.engine.async_thread_client import AsyncThreadClient
from minivllm.engine.step_recorder import StepRecorder
from minivllm.entrypoints.openai.stream import until_disconnected
from minivllm.errors import EngineDeadError, MinivllmError
from minivllm.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.sampling_params import RequestOutputKind
from minivllm_lab.checks.checking import module_from
from minivllm_lab.exercise import checks_of, run_checks

pytestmark = pytest.mark.usefixtures("warm_processes")

PROMPTS = ["import os\n", "def add(a, b):\n", "class Node:\n", "for name in"]
SETTINGS = {"model": EMBEDDED_MODEL, "device": "cpu", "max_model_len": 256, "num_gpu_blocks_override": 200}


@contextmanager
def engine_in_a_loop(in_thread: bool = False, **settings):
    """Yield a function that runs `work(engine)` in a loop. At the end the engine's processes must
    be gone.
    """
    with ThreadPoolExecutor(1) as thread:
        runner = thread.submit(asyncio.Runner).result()

        def run(work):
            return thread.submit(runner.run, asyncio.wait_for(work(engine), 240)).result()

        async def make():
            args = EngineArgs(**SETTINGS | settings)
            return AsyncLLM(args, AsyncThreadClient(args) if in_thread else None)

        engine = thread.submit(runner.run, make()).result()
        cores = getattr(engine.engine_core, "cores", None)
        try:
            yield run
        finally:
            thread.submit(engine.shutdown).result()
            thread.submit(runner.close).result()
            assert cores is None or all(process.poll() is not None for process in cores.processes)


@pytest.fixture(scope="module")
def on_thread():
    """Yield a function that returns the result of `work(engine)` on an engine whose core is in a
    thread.
    """
    with engine_in_a_loop(in_thread=True) as run:
        yield run


@pytest.fixture(scope="module")
def on_process():
    with engine_in_a_loop() as run:
        yield run


@pytest.fixture(params=["process", "thread"])
def on_engine(request):
    return request.getfixturevalue(f"on_{request.param}")


def params(kind: RequestOutputKind, **more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "output_kind": kind} | more)


LONG = params(RequestOutputKind.DELTA, ignore_eos=True, max_tokens=200)


async def collected(engine: AsyncLLM, prompt: str, wanted: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, wanted, name)]


async def nothing_left(engine: AsyncLLM) -> None:
    for _ in range(200):
        if not engine.stats.num_running_reqs and not engine.stats.num_waiting_reqs and not engine.stats.kv_cache_usage:
            break
        await asyncio.sleep(0.01)
        await collected(engine, "x", params(RequestOutputKind.FINAL_ONLY), f"probe-{time.monotonic()}")
    assert engine.get_num_unfinished_requests() == 0
    assert not engine._children
    assert not engine._collectors


@pytest.fixture(scope="module")
def sound():
    offline = params(RequestOutputKind.FINAL_ONLY, n=2, seed=1, temperature=1)
    return LLM(**SETTINGS).generate(PROMPTS, offline, use_tqdm=False)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_same_answers_as_offline_side_by_side(kind: RequestOutputKind, on_engine, sound):
    async def work(engine: AsyncLLM):
        jobs = [collected(engine, prompt, params(kind, n=2, seed=1, temperature=1), prompt) for prompt in PROMPTS]
        result = await asyncio.gather(*jobs)
        await nothing_left(engine)
        return result

    for outputs, right in zip(on_engine(work), sound, strict=True):
        last = outputs[-1]
        if kind is RequestOutputKind.DELTA:
            last = outputs[0]
            for delta in outputs[1:]:
                last.add(delta)
        assert completions_of(last) == completions_of(right)


def completions_of(output: RequestOutput) -> list[tuple[int, str, list[int]]]:
    return sorted((completion.index, completion.text, completion.token_ids) for completion in output.outputs)


def test_a_reader_who_leaves_frees_the_blocks_at_once(on_engine):
    """A reset right after the abort would be refused if any request still held a block."""

    async def work(engine: AsyncLLM):
        for number in range(3):
            reading = engine.generate("def f", LONG, f"a{number}")
            await anext(reading)
            await reading.aclose()
            assert await engine.reset_prefix_cache()
            job = asyncio.create_task(collected(engine, "x", params(RequestOutputKind.DELTA), f"b{number}"))
            await asyncio.sleep(0.01)
            job.cancel()
        await asyncio.sleep(0)
        await nothing_left(engine)

    on_engine(work)


def test_abort_ends_a_request_with_its_reason(on_engine):
    async def work(engine: AsyncLLM):
        job = asyncio.create_task(collected(engine, "x", LONG, "a"))
        states = engine.output_processor.states
        while not any(state.completion.token_ids for state in states.values()):
            await asyncio.sleep(0.005)
        await engine.abort("a")
        outputs = await job
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        await engine.abort("nobody")
        await nothing_left(engine)

    on_engine(work)


def test_what_is_refused_is_refused_where_the_caller_is_and_the_rest_goes_on(on_process):
    async def work(engine: AsyncLLM):
        with pytest.raises(MinivllmError, match="256"):
            await collected(engine, "x " * 500, params(RequestOutputKind.DELTA), "long")
        first = asyncio.create_task(collected(engine, "x", params(RequestOutputKind.DELTA), "same"))
        await asyncio.sleep(0)
        with pytest.raises(MinivllmError, match="exists already"):
            await collected(engine, "y", params(RequestOutputKind.DELTA), "same")
        assert (await first)[-1].finished
        await nothing_left(engine)

    on_process(work)


@contextmanager
def watching(engine: AsyncLLM):
    """Collect the snapshots of the engine's steps."""
    lines = []

    def watch(core, line):
        lines.append(json.loads(line))

    engine.step_watchers.append(watch)
    yield lines
    engine.step_watchers.remove(watch)


def test_the_state_comes_at_once_then_each_step_and_at_last_a_change_without_a_step(on_engine):
    """An abort and a reset, which no step follows, appear in the state before the reset is
    answered.
    """

    async def work(engine: AsyncLLM):
        await engine.reset_prefix_cache()
        with watching(engine) as lines:
            await engine.start_step_events()
            assert [(line["step"], line["running"]) for line in lines] == [(0, [])]
            reading = engine.generate(PROMPTS[1] * 4, LONG, "watched")
            await anext(reading)
            await reading.aclose()
            assert await engine.reset_prefix_cache()
            last = lines[-1]
            await engine.stop_step_events()
        return lines, last

    lines, last = on_engine(work)
    assert any(line["running"] for line in lines)
    assert any(line["cached"] for line in lines)
    assert {after["step"] - before["step"] for before, after in pairwise(lines)} <= {0, 1}, "a step is missing"
    assert (last["running"], last["cached"]) == ([], [])


# With the core in a thread, where its parts can be a caller's and be watched


def test_every_output_of_a_large_step_reaches_its_reader(on_thread, monkeypatch):
    monkeypatch.setattr(async_llm, "OUTPUTS_AT_ONCE", 4)

    async def work(engine):
        wanted = params(RequestOutputKind.DELTA, max_tokens=3, ignore_eos=True)
        answers = await asyncio.gather(*(collected(engine, "x", wanted, str(number)) for number in range(9)))
        return [sum(len(output.outputs[0].token_ids) for output in outputs) for outputs in answers]

    assert on_thread(work) == [3] * 9


def test_a_policy_and_pool_of_the_callers_schedule_and_the_cores_end_ends_its_readers():
    pool = type("OwnPool", (BlockPool,), {})
    policy = SchedulingPolicy(victim=lambda running, *_: running[-1], block_pool=pool)

    async def work(engine):
        assert isinstance(engine.engine_core, AsyncThreadClient)
        scheduler = engine.engine_core.engine_core.scheduler
        assert (scheduler.policy, type(scheduler.kv_cache_manager.block_pool)) == (policy, pool)
        assert await collected(engine, "x", params(RequestOutputKind.FINAL_ONLY), "a")
        engine.engine_core.shutdown()
        with pytest.raises(EngineDeadError):
            await collected(engine, "x", LONG, "b")

    with engine_in_a_loop(parts=Parts(policy=policy)) as on_an_engine_of_its_own:
        on_an_engine_of_its_own(work)


def test_a_recorder_that_fails_costs_no_request_its_answer(on_thread, monkeypatch):
    async def work(engine):
        await engine.start_step_events()
        monkeypatch.setattr(StepRecorder, "snapshot", lambda *_: 1 / 0)
        outputs = await collected(engine, "x", params(RequestOutputKind.FINAL_ONLY, max_tokens=3, ignore_eos=True), "a")
        assert engine.engine_core.engine_core.step_recorder is None
        return outputs[0].outputs[0].token_ids

    assert len(on_thread(work)) == 3


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_fails_is_shown_though_no_request_is_left(ahead):
    async def work(engine):
        with watching(engine) as lines:
            await engine.start_step_events()
            reading = engine.generate("def f", LONG, "a")
            await anext(reading)
            executor = engine.engine_core.engine_core.executor
            start = executor.start_model

            def fails_once(*_, **__):
                executor.start_model = start
                raise ZeroDivisionError

            executor.start_model = fails_once
            *_, last = [output async for output in reading]
        assert last.finished
        assert (lines[-1]["running"], lines[-1]["num_waiting"]) == ([], 0)

    with engine_in_a_loop(in_thread=True, async_scheduling=ahead) as on_an_engine_of_its_own:
        on_an_engine_of_its_own(work)


def test_a_call_that_is_cancelled_before_its_answer_breaks_nothing(on_thread):
    async def work(engine):
        wrong = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context["exception"]))
        await engine.reset_prefix_cache()
        call = asyncio.create_task(engine.reset_prefix_cache())
        await asyncio.sleep(0)
        call.cancel()
        await engine.reset_prefix_cache()
        return wrong

    assert on_thread(work) == []


def test_a_failing_utility_raises_where_it_is_called(on_thread, monkeypatch):
    async def work(engine):
        monkeypatch.setattr(engine.engine_core.engine_core, "reset_prefix_cache", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="reset_prefix_cache failed in the engine's core: ZeroDivisionError"):
            await engine.reset_prefix_cache()

    on_thread(work)


def test_the_servers_own_form_passes_the_exercises_checks(tmp_path):
    """The exercise's checks of a client that leaves also pass on the server's own implementation."""
    own = module_from("", tmp_path / "own.py")
    own.until_disconnected = until_disconnected
    names = ("the works result is returned", "a client that leaves ends the work", "who cancels is told")
    checks = [check for check in checks_of("06") if check.__name__[6:].replace("_", " ") in names]
    assert len(checks) == len(names)
    assert [result.problem for result in run_checks(own, checks)] == [None] * len(names)


# Ends


def test_a_killed_core_is_told_to_all_readers_at_once():
    async def work(engine: AsyncLLM):
        core = engine.engine_core.cores.processes[0].pid
        os.kill(core, signal.SIGSTOP)  # however long this process is held up, none of them ends before the core
        jobs = [asyncio.create_task(collected(engine, "x", LONG, str(index))) for index in range(5)]
        while len(engine.output_processor.states) < 5:
            await asyncio.sleep(0.005)
        os.kill(core, signal.SIGKILL)
        ends = await asyncio.gather(*jobs, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineDeadError}
        assert all("was killed by SIGKILL" in str(end) for end in ends)
        assert engine.errored
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await collected(engine, "x", LONG, "late")

    with engine_in_a_loop() as on_an_engine_of_its_own:
        on_an_engine_of_its_own(work)


def test_a_long_step_is_healthy_and_one_without_end_is_not(monkeypatch):
    async def health(engine: AsyncLLM) -> str:
        try:
            await engine.check_health()
        except EngineDeadError as error:
            return str(error)
        return ""

    async def work(engine: AsyncLLM):
        *_, rank = psutil.Process(engine.engine_core.cores.processes[0].pid).children()
        stream = engine.generate("x", LONG, "a")
        await anext(stream)
        rank.suspend()  # the core waits for it
        since = time.monotonic()
        while time.monotonic() - since < 5 * async_llm.SECONDS_WITHOUT_ANSWER:
            assert await health(engine) == ""
            await asyncio.sleep(0.05)
        monkeypatch.setattr(async_llm, "SECONDS_FOR_A_STEP", 0.1)
        while "has not finished a step" not in await health(engine):
            await asyncio.sleep(0.05)
        rank.resume()
        assert [_ async for _ in stream]
        while await health(engine):
            await asyncio.sleep(0.05)

    monkeypatch.setattr(async_llm, "SECONDS_WITHOUT_ANSWER", 0.4)
    with engine_in_a_loop(tensor_parallel_size=2) as on_two_ranks:
        on_two_ranks(work)


def test_with_a_core_the_others_end_though_nobody_shuts_the_engine_down():
    async def work(engine: AsyncLLM):
        dead, other = engine.engine_core.cores.processes
        other.send_signal(signal.SIGSTOP)  # or its stream might be over before the death is noticed
        stream = engine.generate("x", LONG, "a", data_parallel_rank=1)
        first = asyncio.ensure_future(anext(stream))
        while not engine.output_processor.states:
            await asyncio.sleep(0.005)
        os.kill(dead.pid, signal.SIGKILL)
        await engine.wait_until_dead()
        other.send_signal(signal.SIGCONT)
        with pytest.raises(EngineDeadError, match="core 0 of 2"):
            await first
        return other

    with engine_in_a_loop(data_parallel_size=2) as on_an_engine_of_its_own:
        other = on_an_engine_of_its_own(work)
        assert eventually(lambda: other.poll() is not None)


def test_a_slow_reader_gets_the_deltas_joined():
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    for token, text in enumerate("abc", start=1):
        collector.put(output(token, text, finished=token == 3))
    joined = asyncio.run(collector.get())
    (only,) = joined.outputs
    assert (only.text, only.token_ids, len(only.logprobs), only.finish_reason) == ("abc", [1, 2, 3], 3, "stop")
    assert joined.finished


def test_no_later_output_hides_that_the_engine_has_ended():
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    for coming in (output(1), EngineDeadError("it has ended"), output(2)):
        collector.put(coming)
    assert asyncio.run(collector.get()).outputs[0].token_ids == [1], "what came before the end is read first"
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="it has ended"):
            asyncio.run(collector.get())


def output(token: int, text: str = "a", finished: bool = False) -> RequestOutput:
    logprobs, reason = [{token: Logprob(-1.0)}], "stop" if finished else None
    completion = CompletionOutput(0, text, [token], logprobs=logprobs, finish_reason=reason)
    return RequestOutput("r", "p", [0], None, [completion], finished=finished)
