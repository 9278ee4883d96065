"""The core in a thread of the server's process, which `Parts` of the core need; quicker to start than a process."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from minivllm import SamplingParams
from minivllm.config import EMBEDDED_MODEL, Parts
from minivllm.core.policy import SchedulingPolicy
from minivllm.engine import async_llm
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.async_thread_client import AsyncThreadClient
from minivllm.engine.step_recorder import StepRecorder
from minivllm.entrypoints.openai.stream import until_disconnected
from minivllm.errors import EngineDeadError
from minivllm.sampling_params import RequestOutputKind
from minivllm_lab.exercise import checks_of, module_from, run_checks

SETTINGS = {"model": EMBEDDED_MODEL, "device": "cpu", "max_model_len": 256, "num_gpu_blocks_override": 65}


def with_engine(work, **settings):
    """`work(engine)` in a loop of its own, in a thread; the engine is shut down afterwards."""

    async def run():
        args = EngineArgs(**SETTINGS | settings)
        engine = AsyncLLM(args, None if args.parts.names_in_core else AsyncThreadClient(args))
        try:
            return await work(engine)
        finally:
            engine.shutdown()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, asyncio.wait_for(run(), 240)).result()


def params(max_tokens, kind=RequestOutputKind.DELTA):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)


def test_a_reader_who_leaves_is_told_to_the_core_at_once():
    """The reset comes after the abort, and is refused while any request holds a block."""

    async def work(engine):
        reading = engine.generate("def f", params(200), "a")
        await anext(reading)
        await reading.aclose()
        return await engine.reset_prefix_cache()

    assert with_engine(work) is True


def test_every_output_of_a_large_step_reaches_its_reader(monkeypatch):
    monkeypatch.setattr(async_llm, "OUTPUTS_AT_ONCE", 4)

    async def ask(engine, number):
        return [len(one.outputs[0].token_ids) async for one in engine.generate("x", params(3), str(number))]

    async def work(engine):
        return await asyncio.wait_for(asyncio.gather(*(ask(engine, number) for number in range(9))), 240)

    assert [sum(counts) for counts in with_engine(work)] == [3] * 9


def test_parts_of_the_core_run_and_the_end_is_told():
    policy = SchedulingPolicy(victim=lambda running, *_: running[-1])

    async def work(engine):
        assert isinstance(engine.engine_core, AsyncThreadClient)
        assert engine.engine_core.engine_core.scheduler.policy is policy
        first = [one async for one in engine.generate("x", params(2, RequestOutputKind.FINAL_ONLY), "a")]
        engine.engine_core.shutdown()
        with pytest.raises(EngineDeadError):
            [_ async for _ in engine.generate("x", params(200), "b")]
        return first[0].outputs[0].token_ids

    assert len(with_engine(work, parts=Parts(policy=policy))) == 2


async def watched(engine):
    """The snapshots of the steps from now on, as they are told."""
    lines = []
    engine.step_watchers.append(lambda core, line: lines.append(json.loads(line)))
    await engine.start_step_events()
    return lines


def test_the_state_is_told_at_once_then_each_step_and_an_abort_after_which_no_step_comes():
    async def work(engine):
        lines = await watched(engine)
        assert [(line["step"], line["running"]) for line in lines] == [(0, [])]
        reading = engine.generate("def f", params(200), "a")
        await anext(reading)
        await reading.aclose()
        await engine.reset_prefix_cache()
        await engine.stop_step_events()
        return lines

    lines = with_engine(work)
    assert any(line["running"] for line in lines)
    steps = [line["step"] for line in lines]
    assert {later - earlier for earlier, later in pairwise(steps)} <= {0, 1}, "a step is missing"
    assert (lines[-1]["running"], lines[-1]["cached"]) == ([], [])


def test_a_recorder_that_fails_costs_no_request_its_answer(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError

    async def work(engine):
        await watched(engine)
        monkeypatch.setattr(StepRecorder, "snapshot", fails)
        outputs = [one async for one in engine.generate("x", params(3), "a")]
        assert engine.engine_core.engine_core.step_recorder is None
        return sum(len(one.outputs[0].token_ids) for one in outputs)

    assert with_engine(work) == 3


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_fails_is_told_though_nobody_is_left(ahead):
    async def work(engine):
        lines = await watched(engine)
        reading = engine.generate("def f", params(200), "a")
        await anext(reading)
        executor = engine.engine_core.engine_core.executor
        execute = executor.execute_model

        def fails_once(*_, **__):
            executor.execute_model = execute
            raise ZeroDivisionError

        executor.execute_model = fails_once
        *_, last = [one async for one in reading]
        assert last.finished
        assert (lines[-1]["running"], lines[-1]["num_waiting"]) == ([], 0)

    with_engine(work, async_scheduling=ahead)


def test_whoever_leaves_before_a_calls_answer_breaks_nothing():
    async def work(engine):
        wrong = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context["exception"]))
        await engine.reset_prefix_cache()
        call = asyncio.create_task(engine.reset_prefix_cache())
        await asyncio.sleep(0)
        call.cancel()
        await engine.reset_prefix_cache()
        return wrong

    assert with_engine(work) == []


def test_a_failing_utility_raises_where_it_is_called():
    async def work(engine):
        engine.engine_core.engine_core.reset_prefix_cache = lambda: 1 / 0
        with pytest.raises(RuntimeError, match="reset_prefix_cache failed in the engine's core: ZeroDivisionError"):
            await engine.reset_prefix_cache()

    with_engine(work)


def test_the_servers_own_form_passes_the_exercises_checks(tmp_path):
    """A client that leaves: what the exercise asks of a learner holds for the server too."""
    own = module_from("", tmp_path / "own.py")
    own.until_disconnected = until_disconnected
    names = ("the works result is returned", "a client that leaves ends the work", "who cancels is told")
    checks = [check for check in checks_of("06") if check.__name__[6:].replace("_", " ") in names]
    assert [(result.name, result.problem) for result in run_checks(own, checks)] == [(name, None) for name in names]
