"""Test the server's start and end: no request is lost, no client hangs, no process is left."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from patience import PATIENCE, eventually
from server.serving import MODEL, Server, free_port, running

from minivllm.entrypoints.cli.main import main
from minivllm.entrypoints.openai.http_server import _drain, address_of
from minivllm.entrypoints.openai.middleware import ServerState

LONG = {"prompt": "def add(a, b):\n", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def ask(server: Server, **fields: object) -> tuple[httpx.Response, float]:
    """Return the answer to a long request, and when it came."""
    reply = httpx.post(f"{server.url}/v1/completions", json=LONG | fields, timeout=2 * PATIENCE)
    return reply, time.monotonic()


class Clients:
    """Clients that send streams and whole requests at the same time."""

    def __init__(self, server: Server, number: int) -> None:
        threads = ThreadPoolExecutor(number)
        self.asked = [threads.submit(ask, server, stream=index % 2 == 0) for index in range(number)]
        assert eventually(lambda: server.metric("vllm:num_requests_running") == number)

    def all_answered(self, since: float) -> None:
        """Expect every client to get an error in time: streams as their last event, the others as
        the status.
        """
        for asked in self.asked:
            reply, when = asked.result(PATIENCE)
            assert when - since < PATIENCE / 2
            if reply.text.startswith("data: "):
                assert reply.status_code == 200
                *_, error, done = reply.text.strip().split("\n\n")
                assert json.loads(error.removeprefix("data: "))["error"]["code"] in (500, 503)
                assert done == "data: [DONE]"
            else:
                assert reply.status_code in (500, 503)
                assert reply.json()["error"]["code"] == reply.status_code


def slow_server(*flags: str):
    """Start a server that is slow, so that requests are running when something happens to it."""
    return running("--max-num-seqs", "4", "--max-model-len", "2048", *flags)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*")}


@pytest.mark.usefixtures("warm_processes")
def test_a_full_queue_refuses_and_a_second_sigterm_does_not_wait_for_open_requests():
    before = shared_memory()
    with slow_server("--max-num-queued-reqs", "5", "--shutdown-timeout", "60") as server:
        assert f":{server.port}\n" in server.said().partition("Serving on http://")[2]
        processes, folder = server.processes(), server.folder()
        assert not folder.exists(), "the sockets' names are not needed once the core is connected"
        clients = Clients(server, 4)
        for body in ({"prompt": "a", "n": 2, "temperature": 1}, {"prompt": ["a", "b"]}):
            reply = server.client.post("/v1/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["type"]) == (503, "ServiceUnavailableError")
            assert "max_num_queued_reqs" in reply.json()["error"]["message"]
        assert server.metric("vllm:admission_rejections_total") == 2
        server.core().suspend()  # or a fast one might have ended some of the four by now
        threads = ThreadPoolExecutor(16)
        for _ in range(16):
            threads.submit(ask, server)
        try:
            rejected = eventually(lambda: server.metric("vllm:admission_rejections_total") == 2 + 15)
            assert rejected, "there is room for one"
        finally:
            server.core().resume()
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: "Shutting down" in server.said())
        assert server.client.get("/health").status_code == 200
        assert not any(asked.done() for asked in clients.asked)
        since = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        clients.all_answered(since)
        assert not psutil.wait_procs(processes, PATIENCE)[1]
        assert not folder.exists()
        assert shared_memory() <= before


def test_open_requests_have_as_long_as_was_said():
    """`_drain` by itself waits for the deadline, but no longer than requests are open."""

    async def seconds(open_for: float, most: float) -> float:
        state, loop = ServerState(), asyncio.get_running_loop()
        state.num_open, start = 1, loop.time()
        loop.call_later(open_for, lambda: setattr(state, "num_open", 0))
        await _drain(state, most, lambda: False)
        return loop.time() - start

    assert 0.4 <= asyncio.run(seconds(2 * PATIENCE, 0.4)) < PATIENCE
    assert 0.2 <= asyncio.run(seconds(0.2, 2 * PATIENCE)) < PATIENCE


@pytest.mark.usefixtures("warm_processes")
def test_open_requests_may_finish_where_there_is_time_and_new_ones_are_refused():
    with slow_server("--shutdown-timeout", "120", "--xray") as server, server.client.stream("GET", "/xray/events"):
        asked = ThreadPoolExecutor(1).submit(ask, server, n=8, max_tokens=100, temperature=1)
        assert eventually(lambda: server.metric("vllm:num_requests_running") == 4)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: "Shutting down" in server.said())
        assert server.client.post("/v1/completions", json=LONG).status_code == 503
        reply, _ = asked.result(2 * PATIENCE)
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] == 8 * 100
        assert server.process.wait(PATIENCE) == 0, "an open x-ray page holds up nobody"


@pytest.mark.usefixtures("warm_processes")
def test_a_core_that_does_not_answer_is_not_healthy_until_it_does():
    with slow_server() as server:
        core = server.core()
        assert {server.client.get("/health").status_code for _ in range(3)} == {200}
        core.suspend()
        try:
            assert eventually(lambda: server.client.get("/health").status_code == 503)
        finally:
            core.resume()
        assert eventually(lambda: server.client.get("/health").status_code == 200)
        Clients(server, 4)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0, "it was asked to end, and has told its client"


@pytest.mark.parametrize(("host", "said"), [("127.0.0.1", "http://127.0.0.1"), ("0.0.0.0", "http://localhost")])
def test_the_address_is_one_that_a_client_can_use(host, said):
    with socket.socket() as listening:
        listening.bind((host, 0))
        assert address_of(listening) == f"{said}:{listening.getsockname()[1]}"


def test_a_port_in_use_is_one_line(capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--host", "127.0.0.1", "--port", str(taken.getsockname()[1])]) == 2
    said = capfd.readouterr().err
    assert "in use" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "no/such/folder"], "no/such/folder"),
        (["serve", str(MODEL), "--max-modellen", "64"], "did you mean --max-model-len?"),
        (["serve", str(MODEL), "--enable-prompt-embeds"], "--enable-prompt-embeds; minivllm serve --help lists"),
        (["serve", str(MODEL), "--lora-modules", "a=b"], "--enable-lora"),
        (["serve", str(MODEL), "--speculative-config", "{"], "JSON"),
        (["serve", str(MODEL), "--dtype", "float7"], "float7"),
        (["serve", str(MODEL), "--chat-template", "{% if %}"], "Jinja"),
        (["serve", str(MODEL), "--max-model-len", "4096"], "max_model_len"),
        (["serve", str(MODEL), "--uvicorn-log-level", "loud"], "critical, error"),
        (["serve", str(MODEL), "--chat-template-content-format", "html"], "one of auto, string, openai"),
        (["serve", str(MODEL), "--shutdown-timeout", "nan"], "shutdown_timeout"),
        (["serve", str(MODEL), "--max-logprobs", "-2"], "max_logprobs"),
        (["sing"], "sing"),
    ],
    ids=lambda value: " ".join(value[2:] or value[:1]) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_one_line(arguments, said, capfd):
    port = ["--port", str(free_port())] if "serve" in arguments and "--port" not in arguments else []
    assert main([*arguments, *port]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("minivllm: ")]
    assert len(lines) == 1
    assert said in lines[0]


def test_a_mistyped_flag_is_told_before_torch_is_loaded():
    lines = ["serve --max-modellen 64", "serve --dtype float7", "proxy --prot"]
    code = (
        "import sys; from minivllm.entrypoints.cli.main import main; "
        "assert all(main(line.split()) == 2 for line in sys.argv[1:]); "
        "print({'torch', 'transformers', 'fastapi'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, *lines], capture_output=True, text=True)
    assert (done.stdout, done.stderr.count("\n")) == ("set()\n", len(lines))


@pytest.mark.parametrize("command", ["serve", "proxy"])
def test_each_flag_is_listed_with_words(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # a line for each flag
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    listed = re.findall(r"^  -.*(?:\n {20,}.*)?", capsys.readouterr().out, re.MULTILINE)
    assert [entry for entry in listed if not re.search(r"\S(  |\n)", entry)] == []
    flags = " ".join(listed)
    if command == "serve":
        for flag in ("--served-model-name", "--api-key", "-pp PIPELINE_PARALLEL_SIZE", "--no-async-scheduling"):
            assert flag in flags
    assert "(default: 8000)" in flags
    assert "--swap-space" not in flags
