"""Servers with two cores and two API servers: all are used, shown, and reset; one process of each kind is killed."""

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
from patience import eventually
from server.serving import Server, running
from server.test_clients import is_idle, raw_request

from minivllm.lab.step_recording import read_lines

pytestmark = pytest.mark.usefixtures("warm_processes")
LONG = {"prompt": "def add(a, b):\n", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": [7] * 64, "max_tokens": 1}
FLAGS = ("--data-parallel-size", "2", "--api-server-count", "2", "--max-num-seqs", "2", "--max-model-len", "2048")
CORE, RANK, API = "minivllm.engine.core_entry", "rank_main.py", "api_server_entry"


@contextlib.contextmanager
def pair_of_cores(folder, *flags: str) -> Iterator[Server]:
    env = {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    with running(*FLAGS, *flags, env=env) as server:
        for rank in ("0", "1"):  # their first step takes long
            assert post(server, {"prompt": "x", "max_tokens": 1}, rank).status_code == 200
        assert len(from_each_api_server(server, "/health")) == 2  # one may start later than the other
        yield server


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recording") / "run.jsonl"


@pytest.fixture(scope="module")
def pair(tmp_path_factory, recording) -> Iterator[Server]:
    with pair_of_cores(tmp_path_factory.mktemp("sockets"), "--record", str(recording)) as server:
        yield server


def processes_of(server: Server, kind: str) -> list[psutil.Process]:
    return [one for one in server.processes() if any(kind in word for word in words_of(one))]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none where it has just ended, and nobody has heard of that yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def core_1(server: Server) -> psutil.Process:
    return next(one for one in processes_of(server, CORE) if one.cmdline()[-1] == "1")


def by_engine(server: Server, name: str, label: str = "") -> dict[str, float]:
    """A metric's values by core, summed over the rows that have the label."""
    rows = rf'^{name}\{{(?=.*{label}).*engine="(\d)".*\}} (\S+)$'
    found: Counter[str] = Counter()
    for engine, value in re.findall(rows, server.client.get("/metrics").text, re.MULTILINE):
        found[engine] += float(value)
    return dict(found)


def from_each_api_server(server: Server, path: str) -> list[httpx.Response]:
    """Answers from different API servers, in the order of their processes."""
    found: dict[int, httpx.Response] = {}
    servers = {one.pid: one for one in processes_of(server, API)}
    while len(found) < len(servers):
        with httpx.Client(base_url=server.url, timeout=60) as client:
            reply = client.get(path)
            port = reply.extensions["network_stream"].get_extra_info("client_addr")[1]
            for pid, one in servers.items():
                if any(held.raddr and held.raddr.port == port for held in one.net_connections("tcp")):
                    found[pid] = reply
    return [found[pid] for pid in sorted(found)]


def test_requests_and_their_aborts_go_to_both_cores(pair: Server):
    """Each may reach either API server; both know the counts of both cores. Some may end before they are left."""
    assert len(processes_of(pair, API)) == 2
    running, waiting, ended = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total"
    anywhere, number = f"(?:{running}|{waiting}|{ended})", 24
    before = sum(by_engine(pair, ended).values())
    with contextlib.ExitStack() as leaving:
        for _ in range(number):
            leaving.enter_context(raw_request(pair, json.dumps(LONG | {"stream": True}).encode()))
        assert eventually(lambda: by_engine(pair, running) == {"0": 2.0, "1": 2.0})
        assert eventually(lambda: sum(by_engine(pair, anywhere).values()) == before + number)
        assert min(by_engine(pair, waiting).values()) >= 2
    assert eventually(lambda: is_idle(pair))
    assert min(by_engine(pair, "vllm:generation_tokens_total").values()) > 0
    assert eventually(lambda: sum(by_engine(pair, ended).values()) == before + number)
    assert min(by_engine(pair, ended, 'finished_reason="abort"').values()) >= 2


def test_each_api_server_shows_all_metrics(pair: Server):
    first, second = from_each_api_server(pair, "/metrics")
    assert first.text == second.text
    assert 'vllm:e2e_request_latency_seconds_count{engine="1"' in first.text


@pytest.mark.parametrize("core", [0, 1])
def test_a_cores_recording_has_each_of_its_steps_whoever_asked(pair: Server, recording: Path, core: int):
    for _ in range(4):  # each may reach either API server
        body, rank = {"prompt": [5] * 40, "max_tokens": 3}, {"X-data-parallel-rank": str(core)}
        httpx.post(f"{pair.url}/v1/completions", json=body, headers=rank, timeout=60)
    assert eventually(lambda: is_idle(pair))
    header, *lines = map(json.loads, read_lines(recording.with_name("run.core1.jsonl") if core else recording))
    assert (header.get("core", 0), header["cores"]) == (core, 2)
    steps = [line.get("step", line.get("key")) for line in lines]
    begins = [at for at, line in enumerate(lines) if "key" in line]
    for begin, end in zip(begins, [*begins[1:], len(steps)], strict=True):
        assert {later - earlier for earlier, later in pairwise(steps[begin:end])} <= {0, 1}, "a step is missing"
    assert steps[-1] >= 12


def test_a_reset_reaches_all_caches(pair: Server):
    def hits() -> dict[str, float]:
        """What each core finds of a prompt, which is sent to both."""
        asked, found = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
        queries, before = by_engine(pair, asked), by_engine(pair, found)
        for rank in before:
            assert post(pair, SHORT, rank).status_code == 200
        # The API server that has answered need not be the one that shows the schedulers' states.
        length = len(SHORT["prompt"])
        wanted = {rank: tokens + length for rank, tokens in queries.items()}
        assert eventually(lambda: by_engine(pair, asked) == wanted)
        after = by_engine(pair, found)
        return {rank: after[rank] - before[rank] for rank in before}

    assert hits() == {"0": 0, "1": 0}
    assert hits() == {"0": 48, "1": 48}
    assert pair.client.post("/reset_prefix_cache").json() == {"success": True}
    assert hits() == {"0": 0, "1": 0}
    assert {post(pair, SHORT, wrong).status_code for wrong in ("2", "-1", "all", "9" * 5000)} == {400}


class Held:
    """Core 1 has begun two requests, then a process of it is held up, and two more come; half of them are streams."""

    def __init__(self, server: Server, process: psutil.Process) -> None:
        self.answers: list[tuple[bool, int, str]] = []
        self._server = server
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(4)]
        self._begin(2)
        assert eventually(lambda: by_engine(server, "vllm:num_requests_running")["1"] == 2)
        process.suspend()
        self._begin(4)
        time.sleep(0.5)  # from counted to sent

    def _begin(self, number: int) -> None:
        for thread in self._threads[number - 2 : number]:
            thread.start()
        server = self._server
        assert eventually(
            lambda: sum(reply.json()["server_load"] for reply in from_each_api_server(server, "/load")) == number, 20
        )

    def _ask(self, index: int) -> None:
        begun = index < 2
        reply = post(self._server, (LONG if begun else SHORT) | {"stream": index % 2 == 0}, "1")
        self.answers.append((begun, reply.status_code, reply.text))

    def only_what_had_begun_has_failed(self) -> None:
        """And was told so, to the end."""
        for thread in self._threads:
            thread.join(60)
        assert len(self.answers) == len(self._threads)
        for begun, status, body in self.answers:
            assert begun == (status != 200 or '"error"' in body)
            assert begun == ('"code":500' in body)
            assert not body.startswith("data: ") or body.endswith("data: [DONE]\n\n")


def post(server: Server, body: dict, rank: str) -> httpx.Response:
    return server.client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": rank})


def test_a_killed_core_takes_with_it_only_what_it_had_begun(pair: Server):
    """And a killed launcher everything. The last of the tests of this server."""
    core = core_1(pair)
    held = Held(pair, core)
    core.kill()
    held.only_what_had_begun_has_failed()
    assert [reply.status_code for reply in from_each_api_server(pair, "/health")] == [503, 503]
    assert by_engine(pair, "vllm:num_requests_running") == {"0": 0.0, "1": 0.0}
    assert pair.client.post("/v1/completions", json=SHORT).status_code == 200, "the other core goes on"
    assert post(pair, SHORT, "1").status_code == 400
    assert pair.client.post("/reset_prefix_cache").json() == {"success": True}
    assert "core 1 of 2" in pair.said()
    assert "Traceback" not in pair.said()
    processes = pair.processes()
    pair.process.kill()
    assert not psutil.wait_procs(processes, 10)[1]


def test_a_killed_rank_is_its_cores_end_and_a_killed_api_server_that_of_all(tmp_path):
    with pair_of_cores(tmp_path, "--distributed-executor-backend", "mp") as server:
        rank = next(one for one in core_1(server).children() if any(RANK in word for word in one.cmdline()))
        held = Held(server, rank)
        rank.kill()
        held.only_what_had_begun_has_failed()
        assert server.client.get("/health").status_code == 503
        assert server.client.post("/v1/completions", json=SHORT).status_code == 200
        processes = server.processes()
        processes_of(server, API)[0].kill()
        assert server.process.wait(60) == 1
        assert not psutil.wait_procs(processes, 10)[1]
        assert "An API server has ended" in server.said()
        assert "Traceback" not in server.said()
    assert not list(tmp_path.iterdir()), "neither sockets nor metrics are left"
