"""One of several cores dies: what becomes of its requests. The cores are doubles."""

import asyncio
from collections.abc import Sequence

import pytest
from engine.test_async_llm import in_a_loop, params
from engine.test_load_balancing import stats

from minivllm.config import EMBEDDED_MODEL
from minivllm.core.limits import RequestLimits
from minivllm.core.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreReady, EngineCoreRequest
from minivllm.engine import async_llm
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import EngineCoreClient
from minivllm.errors import CoreDiedError, EngineDeadError
from minivllm.sampling_params import RequestOutputKind


class Cores(EngineCoreClient):
    """Two cores, which compute what the test says."""

    def __init__(self, args: EngineArgs, addresses: object = None) -> None:
        self.engines = [EngineCoreReady(RequestLimits(256, 16, 99), 100, None, stats())] * 2
        self.dead_ranks: set[int] = set()
        self.sent: list[tuple[int, EngineCoreRequest]] = []
        self.events: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()

    def add_request(self, request: EngineCoreRequest) -> None:
        request.data_parallel_rank = next(rank for rank in (1, 0) if rank not in self.dead_ranks)
        self.sent.append((request.data_parallel_rank, request))

    def abort_requests(self, request_ids: Sequence[str]) -> None: ...

    def get_output(self) -> EngineCoreOutputs:
        raise NotImplementedError

    def call_utility(self, method: str) -> None: ...

    def shutdown(self) -> None: ...

    async def get_output_async(self) -> EngineCoreOutputs:
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def says(self, rank: int, request_id: str, finish: str | None = None) -> None:
        output = EngineCoreOutput(request_id, [5], finish_reason=finish)
        self.events.put_nowait(EngineCoreOutputs([output], stats(running=1), engine_index=rank))

    def kill(self, rank: int, request_ids: Sequence[str]) -> None:
        self.dead_ranks.add(rank)
        self.events.put_nowait(CoreDiedError("core 1 was killed", rank, request_ids))


def with_cores(monkeypatch, work, **settings):
    monkeypatch.setattr(async_llm, "AsyncMPClient", Cores)

    async def run():
        engine = async_llm.AsyncLLM(EngineArgs(model=EMBEDDED_MODEL, data_parallel_size=2, **settings))
        cores = engine.engine_core
        assert isinstance(cores, Cores)
        try:
            return await work(engine, cores)
        finally:
            engine.shutdown()

    return in_a_loop(run())


async def begun(engine: async_llm.AsyncLLM, cores: Cores, *names: str) -> list[async_llm.RequestOutputCollector]:
    """Requests on core 1, of which the first has said something."""
    found = [await engine.add_request(name, "x", params(RequestOutputKind.DELTA)) for name in names]
    cores.says(1, cores.sent[0][1].request_id)
    await found[0].get()
    return found


def ids(cores: Cores) -> list[str]:
    return [request.request_id for _, request in cores.sent]


def test_what_nobody_has_seen_yet_starts_again_elsewhere_and_the_rest_fails(monkeypatch):
    async def work(engine, cores):
        seen, unseen = await begun(engine, cores, "seen", "unseen")
        cores.kill(1, ids(cores))
        failed = await seen.get()
        assert failed.finished
        assert failed.outputs[0].finish_reason == "error"
        assert "has ended" in failed.outputs[0].error
        assert [(rank, request.request_id) for rank, request in cores.sent[2:]] == [(0, "unseen-1")]
        cores.says(0, "unseen-1", finish="stop")
        assert (await unseen.get()).outputs[0].finish_reason == "stop"
        assert not engine.errored
        assert engine.stats.num_running_reqs == 1, "those of the dead core do not count"
        with pytest.raises(EngineDeadError, match=r"\[1\]"):
            await engine.check_health()
        await engine.add_request("new", "x", params(RequestOutputKind.DELTA))
        assert cores.sent[-1][0] == 0

    with_cores(monkeypatch, work)


def test_nothing_starts_again_where_that_is_switched_off(monkeypatch):
    async def work(engine, cores):
        collectors = await begun(engine, cores, "seen", "unseen")
        cores.kill(1, ids(cores))
        assert [(await one.get()).outputs[0].finish_reason for one in collectors] == ["error", "error"]
        assert len(cores.sent) == 2

    with_cores(monkeypatch, work, data_parallel_retry=False)


def test_a_request_that_may_have_killed_two_cores_gets_no_third(monkeypatch):
    async def work(engine, cores):
        _, unseen = await begun(engine, cores, "seen", "unseen")
        cores.kill(1, ids(cores))
        while len(cores.sent) < 3:
            await asyncio.sleep(0)
        cores.dead_ranks = {0}
        cores.kill(0, ids(cores)[1:2])
        assert (await unseen.get()).outputs[0].finish_reason == "error"
        assert len(cores.sent) == 3

    with_cores(monkeypatch, work)


def test_the_last_cores_end_is_the_engines(monkeypatch):
    async def work(engine, cores):
        seen, unseen = await begun(engine, cores, "seen", "unseen")
        cores.kill(1, ids(cores))
        assert (await seen.get()).outputs[0].finish_reason == "error"
        cores.events.put_nowait(EngineDeadError("core 0 was killed"))
        await engine.wait_until_dead()
        assert engine.errored
        with pytest.raises(EngineDeadError, match="core 0"):
            await unseen.get()

    with_cores(monkeypatch, work)
