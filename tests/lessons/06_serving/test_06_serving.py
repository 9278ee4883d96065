"""Lesson 06: its servers do what the text says, its kernel is right, its exercise catches
mistakes.
"""

import asyncio
import json
import re
import subprocess
import time
from itertools import pairwise
from unittest import mock

import pytest
import torch
from kernels.harness import assert_compiles
from lessons.harness import REPOSITORY, exercise_test, figures_of_quick_run, script_path
from patience import PATIENCE
from warm_processes import WarmSubprocess

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm_lab.exercise import load
from minivllm_lab.pictures.followed import PROMPT, followed
from minivllm_lab.serving import raw_clients, report, timelines
from minivllm_lab.serving.core_places import CoreInLoop
from minivllm_lab.serving.processes import processes
from minivllm_lab.serving.request_trace import HOPS
from minivllm_lab.serving.stage import Stage

lesson = load(script_path("06"))
TEXT = (REPOSITORY / "lessons" / "06_serving.md").read_text()

# ---- the text ------------------------------------------------------------------------------------


def test_the_collector_by_hand():
    """The client reads after the first, the fourth and the fifth output, as in the text's table."""
    pieces = [token.text for token in followed("alone").request.output][:5]
    assert pieces == [" a", " +", " b", "\n", "\n"]

    async def read() -> list[str]:
        collector, result = lesson.RequestOutputCollector(), []
        for step, piece in enumerate(pieces, start=1):
            collector.put(RequestOutput("add", None, [], None, [CompletionOutput(0, piece, [step])], finished=False))
            if step in (1, 4, 5):
                result.append((await collector.get()).outputs[0].text)
        return result

    run = asyncio.run(read())
    assert run == [" a", " + b\n", "\n"]
    for text in run:
        assert f"reads `{text!r}`".replace("'", '"') in TEXT


def test_the_picture_of_the_loop_shows_what_the_cell_prints():
    for blocked, name in ((False, "sleep"), (True, "blocks")):
        seconds = "  ".join(str(tenths / 10) for tenths in timelines.ticks(blocked))
        assert f"\n{seconds}  {name}\n" in TEXT


def test_the_others_wait_for_the_tunnel_on_the_naive_server_only():
    gaps = [max(later - at for at, later in pairwise(timelines.turns(stops))) for stops in (True, False)]
    start, end = timelines.TUNNEL
    assert gaps == [end - start + 1, 1]


@pytest.mark.parametrize(("tp", "dp", "total"), [(4, 1, 6), (1, 4, 13)])
def test_processes_are_counted_as_vllm_counts_them(tp, dp, total):
    """Each engine has an API server and a core, each GPU a worker, and several engines a coordinator."""
    drawn = processes(tp, dp)
    assert f">-{'tp' if tp > 1 else 'dp'} 4: {total} processes<" in drawn
    assert len(re.findall(r">(?:server \d|core \d|worker \d|coordinator)<", drawn)) == total
    assert "`-tp 4`: 6; `-dp 4`: 13;" in TEXT


# ---- the servers ---------------------------------------------------------------------------------

SETTINGS = {"model": str(EMBEDDED_MODEL), "device": "cpu", "num_gpu_blocks_override": 100, "max_model_len": 256}


def test_the_server_says_what_the_engine_says_and_forgets_who_leaves():
    """One server, on real sockets, sends a request's whole text with and without a stop string;
    then a client leaves.
    """
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    text = LLM(**SETTINGS).generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    core = CoreInLoop(SETTINGS)
    server = lesson.Server(core, str(EMBEDDED_MODEL))
    with Stage() as stage:
        port = stage.serve(server, core)
        assert texts_of(port, {"prompt": PROMPT, "max_tokens": 24}) == text
        stopped = texts_of(port, {"prompt": PROMPT, "max_tokens": 24, "stop": ["\n\ndef"]})
        assert stopped == text[: text.index("\n\ndef")]
        assert raw_clients.held(core.core) == 0, "a stop string ends the request in the core too"
        leaving = raw_clients.RawClient(port, {"prompt": PROMPT, "max_tokens": 200})
        leaving.read_events(2)
        leaving.socket.close()
        end = time.monotonic() + PATIENCE
        while raw_clients.held(core.core) and time.monotonic() < end:
            time.sleep(0.005)
        assert raw_clients.held(core.core) == 0
        assert server.streams.readers == {}
        assert server.unread < 5, "it went on computing"


def test_no_client_waits_for_a_core_that_has_failed():
    """Whatever ended the core, the stream ends without an event."""
    asked = asyncio.Event()

    async def fail():
        await asked.wait()
        raise TypeError("no such field")

    core = mock.AsyncMock(send=lambda *_: asked.set(), get_output=fail, close=mock.Mock())
    with Stage() as stage:
        port = stage.serve(lesson.Server(core, str(EMBEDDED_MODEL)), core)
        client = raw_clients.RawClient(port, {"prompt": PROMPT, "max_tokens": 24})
        client.socket.settimeout(PATIENCE)
        assert client.read_events() == 0
        client.socket.close()


def texts_of(port, body):
    """Return the texts of all events of a request, joined."""
    client = raw_clients.RawClient(port, body)
    answer = b"".join(iter(lambda: client.socket.recv(1 << 16), b""))
    client.socket.close()
    return "".join(json.loads(event)["text"] for event in answer.decode().split("data: ")[1:])


# ---- the kernel ----------------------------------------------------------------------------------


def test_the_scripts_own_proof_holds(device):
    assert report.verify_mask(lesson.apply_grammar_bitmask_kernel, device)


def test_the_kernel_compiles():
    pointers = {"logits": "*fp32", "bitmask": "*i32", "has_grammar": "*i32"}
    sizes = {"vocab_size": 128, "num_words": 4, "BLOCK": 32}
    assert_compiles(lesson.apply_grammar_bitmask_kernel, pointers | sizes)


def test_bits_are_where_they_should_be():
    assert report.as_bitmask(torch.tensor([[True, False, True]])).tolist() == [[5]]
    assert report.as_bitmask(torch.arange(33)[None] >= 31).tolist() == [[-(2**31), 1]]


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("06")


# ---- the script from outside ---------------------------------------------------------------------


@pytest.fixture
def warm_cores(template, warm_processes, tmp_path, monkeypatch):
    """Fork the script's own core process too, as the real server's is."""
    start, code = subprocess.Popen, tmp_path / "core.py"

    def start_warm(command, **options):
        if template is None or command[1] != "-c":
            return start(command, **options)
        code.write_text(command[2])
        command = [command[0], str(code), *command[3:]]
        return WarmSubprocess(template).Popen(command, stdin=subprocess.DEVNULL, pass_fds=options["pass_fds"])

    monkeypatch.setattr(subprocess, "Popen", start_warm)


@pytest.mark.usefixtures("warm_cores")
def test_quick_run(tmp_path):
    figures = figures_of_quick_run("06", tmp_path)
    at = figures["trace"]["at_ms"]
    assert list(at)[1:-1] == list(HOPS), "every hop is passed"
    assert sorted(at.values()) == list(at.values()), "in this order"
    assert 0 < figures["trace"]["server_ttft_ms"] < figures["trace"]["ttft_ms"]
    slow, left = figures["slow"]["servers"], figures["left"]
    still = 1000 * figures["slow"]["unread_seconds"]
    assert slow["naive"]["longest_gap_ms"] > 0.9 * still, "all wait, though a client may read its last event late"
    assert slow["naive"]["events"] > 380, "one for each token, but for a few that a busy machine reads together"
    assert slow["this lesson's"]["events"] < slow["naive"]["events"], "what was not read was merged"
    assert left["naive"]["in_vain"] > 0.8 * 6 * 197
    assert left["this lesson's"]["in_vain"] < left["naive"]["in_vain"] / 4
    assert left["naive"]["most_blocks"] > left["this lesson's"]["most_blocks"]
    for clients, figure in figures["load"]["closed"].items():
        assert figure["little"] <= 1.01 * int(clients), "no more can be inside than ask"
    ways = figures["ways"]["ways"]
    assert ways["TP"]["alone_ms"] < ways["DP"]["alone_ms"] < ways["PP"]["alone_ms"]
    assert ways["TP"]["tpot_ms"]["at_60"] < ways["DP"]["tpot_ms"]["at_60"]
    assert ways["TP"]["sent_64"] > 50 * ways["PP"]["sent_64"] > 0
