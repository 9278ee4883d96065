"""The engine for an event loop: the same answers, deltas that add up, readers that leave, a core that dies."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from patience import eventually

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM, RequestOutputCollector
from minivllm.errors import EngineDeadError, MinivllmError
from minivllm.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.usefixtures("warm_processes")

PROMPTS = ["import os\n", "def add(a, b):\n", "class Node:\n", "for name in"]
SETTINGS = {"model": EMBEDDED_MODEL, "device": "cpu", "max_model_len": 256, "num_gpu_blocks_override": 200}


def in_a_loop(work: Coroutine):
    """Run in a loop of its own, in a thread: browser tests leave one running in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, asyncio.wait_for(work, 240)).result()


@contextmanager
def engine_in_a_loop(**more):
    """Gives a function that runs `work(engine)` in a loop. At the end the engine's processes must be gone."""
    with ThreadPoolExecutor(1) as thread:
        runner = thread.submit(asyncio.Runner).result()

        def run(work):
            return thread.submit(runner.run, asyncio.wait_for(work(engine), 240)).result()

        async def made():
            return AsyncLLM(EngineArgs(**SETTINGS, **more))

        engine = thread.submit(runner.run, made()).result()
        processes = engine.engine_core.cores.processes
        try:
            yield run
        finally:
            thread.submit(engine.shutdown).result()
            thread.submit(runner.close).result()
            assert all(process.poll() is not None for process in processes)


@pytest.fixture(scope="module")
def on_engine():
    """`on_engine(work)`: what `work(engine)` gives, on one engine for all these tests."""
    with engine_in_a_loop() as run:
        yield run


def params(kind: RequestOutputKind, **more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "output_kind": kind} | more)


async def collected(engine: AsyncLLM, prompt: str, wanted: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, wanted, name)]


async def nothing_left(engine: AsyncLLM) -> None:
    for _ in range(200):
        if not engine.stats.num_running_reqs and not engine.stats.num_waiting_reqs and not engine.stats.kv_cache_usage:
            break
        await asyncio.sleep(0.01)
        [_ async for _ in engine.generate("x", params(RequestOutputKind.FINAL_ONLY), f"probe-{time.monotonic()}")]
    assert engine.get_num_unfinished_requests() == 0
    assert not engine._children
    assert not engine._collectors


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_same_answers_as_offline_side_by_side(kind: RequestOutputKind, on_engine):
    async def work(engine: AsyncLLM):
        jobs = [collected(engine, prompt, params(kind, n=2, seed=1, temperature=1), prompt) for prompt in PROMPTS]
        found = await asyncio.gather(*jobs)
        await nothing_left(engine)
        return found

    found = on_engine(work)
    offline = params(RequestOutputKind.FINAL_ONLY, n=2, seed=1, temperature=1)
    sound = LLM(**SETTINGS).generate(PROMPTS, offline, use_tqdm=False)
    for outputs, right in zip(found, sound, strict=True):
        if kind is RequestOutputKind.DELTA:
            whole = outputs[0]
            for delta in outputs[1:]:
                whole.add(delta)
            outputs = [whole]
        assert sorted((one.index, one.text, one.token_ids) for one in outputs[-1].outputs) == sorted(
            (one.index, one.text, one.token_ids) for one in right.outputs
        )


def test_a_reader_who_leaves_frees_the_blocks(on_engine):
    async def work(engine: AsyncLLM):
        for round_ in range(3):
            reading = engine.generate("def f", params(RequestOutputKind.DELTA, ignore_eos=True), f"a{round_}")
            await anext(reading)
            await reading.aclose()
            job = asyncio.create_task(collected(engine, "x", params(RequestOutputKind.DELTA), f"b{round_}"))
            await asyncio.sleep(0.01)
            job.cancel()
        await asyncio.sleep(0)
        await nothing_left(engine)

    on_engine(work)


def test_abort_ends_a_request_with_its_reason(on_engine):
    async def work(engine: AsyncLLM):
        long = params(RequestOutputKind.DELTA, ignore_eos=True, max_tokens=200)
        job = asyncio.create_task(collected(engine, "x", long, "a"))
        while not engine.output_processor.states or not next(iter(engine.output_processor.states.values())).token_ids:
            await asyncio.sleep(0.005)
        await engine.abort("a")
        outputs = await job
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        await engine.abort("nobody")
        await nothing_left(engine)

    on_engine(work)


def test_what_is_refused_is_refused_where_the_caller_is_and_the_rest_goes_on(on_engine):
    async def work(engine: AsyncLLM):
        with pytest.raises(MinivllmError, match="256"):
            await collected(engine, "x " * 500, params(RequestOutputKind.DELTA), "long")
        first = asyncio.create_task(collected(engine, "x", params(RequestOutputKind.DELTA), "same"))
        await asyncio.sleep(0)
        with pytest.raises(MinivllmError, match="exists already"):
            await collected(engine, "y", params(RequestOutputKind.DELTA), "same")
        assert (await first)[-1].finished
        assert await engine.reset_prefix_cache() is True
        await nothing_left(engine)

    on_engine(work)


def test_a_change_that_no_step_tells_is_told_before_the_answer(on_engine):
    async def work(engine):
        lines = []

        def watch(core, line):
            lines.append(json.loads(line))

        engine.step_watchers.append(watch)
        await engine.start_step_events()
        await collected(engine, PROMPTS[1], params(RequestOutputKind.FINAL_ONLY), "watched")
        cached = lines[-1]["cached"]
        assert await engine.reset_prefix_cache()
        last = lines[-1]
        await engine.stop_step_events()
        engine.step_watchers.remove(watch)
        return cached, last["cached"]

    cached, afterwards = on_engine(work)
    assert cached
    assert afterwards == []


def test_a_killed_core_is_told_to_all_readers_at_once():
    async def work(engine: AsyncLLM):
        long = params(RequestOutputKind.DELTA, ignore_eos=True, max_tokens=200)
        core = engine.engine_core.process.pid
        os.kill(core, signal.SIGSTOP)  # however long this process is held up, none of them ends before the core
        jobs = [asyncio.create_task(collected(engine, "x", long, f"{index}")) for index in range(5)]
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
            await collected(engine, "x", long, "late")

    with engine_in_a_loop() as on_an_engine_of_its_own:
        on_an_engine_of_its_own(work)


def test_with_a_core_the_others_end_though_nobody_shuts_the_engine_down():
    async def work(engine: AsyncLLM):
        long = params(RequestOutputKind.DELTA, ignore_eos=True, max_tokens=200)
        dead, other = engine.engine_core.cores.processes
        streams = [engine.generate("x", long, f"{rank}", data_parallel_rank=rank) for rank in (0, 1)]
        for stream in streams:
            await anext(stream)
        os.kill(dead.pid, signal.SIGKILL)
        await engine.wait_until_dead()
        with pytest.raises(EngineDeadError, match="core 0 of 2"):
            [_ async for _ in streams[1]]
        return other

    with engine_in_a_loop(data_parallel_size=2) as on_an_engine_of_its_own:
        other = on_an_engine_of_its_own(work)
        assert eventually(lambda: other.poll() is not None)


def test_a_slow_reader_gets_the_deltas_joined():
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    for token, text in ((1, "a"), (2, "b"), (3, "c")):
        completion = CompletionOutput(
            0, text, [token], logprobs=[{token: Logprob(-1.0)}], finish_reason="stop" * (token == 3) or None
        )
        collector.put(RequestOutput("r", "p", [0], None, [completion], finished=token == 3))
    joined = in_a_loop(collector.get())
    (only,) = joined.outputs
    assert (only.text, only.token_ids, len(only.logprobs), only.finish_reason) == ("abc", [1, 2, 3], 3, "stop")
    assert joined.finished


def test_no_later_output_hides_that_the_engine_has_ended():
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    for coming in (output(1), EngineDeadError("it has ended"), output(2)):
        collector.put(coming)
    assert in_a_loop(collector.get()).outputs[0].token_ids == [1], "what came before the end is read first"
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="it has ended"):
            in_a_loop(collector.get())


def output(token: int) -> RequestOutput:
    return RequestOutput("r", "p", [0], None, [CompletionOutput(0, "a", [token])], finished=False)
