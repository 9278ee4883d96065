"""Lesson 08: two engines generate what one does, blocks are held and freed, kernels are right,
checks catch mistakes.
"""

import json
import socket
import time
from argparse import Namespace
from functools import partial

import pytest
import torch
from kernels.harness import assert_compiles
from lessons.harness import REPOSITORY, exercise_test, figures_of_quick_run, script_path
from patience import PATIENCE

from minivllm.config import EMBEDDED_MODEL
from minivllm.core.request import RequestStatus
from minivllm_lab.disaggregation import engines, interference, report
from minivllm_lab.disaggregation.transfer_worker import send_data, until_finished
from minivllm_lab.engines.disturbed_chats import random_prompt
from minivllm_lab.exercise import load
from minivllm_lab.paged_model import PagedModel

lesson = load(script_path("08"))
ARGUMENTS = Namespace(model=str(EMBEDDED_MODEL), device=torch.device("cpu"), quick=True, prompt=100, seed=0)
make = partial(lesson.two_engines, ARGUMENTS)

# ---- the kernels ---------------------------------------------------------------------------------


def test_the_scripts_own_proof_holds(device):
    assert engines.verify_kernels(lesson.launch, lesson.gather_kernel, lesson.scatter_kernel, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_other_numbers_are_moved_as_they_are(dtype, device):
    cache = (100 * torch.randn(4, 5, 130)).to(dtype).to(device)
    ids = torch.tensor([3, 1], dtype=torch.int32, device=device)
    staging = lesson.launch(lesson.gather_kernel, cache, cache.new_empty(2, 4, 130), ids)
    assert torch.equal(staging, cache[:, [3, 1]].transpose(0, 1))


def test_the_kernels_compile():
    cache, ids = torch.zeros(4, 8, 1024), torch.zeros(16, dtype=torch.int32)
    ends, sizes = {"cache": cache, "staging": cache}, {"numbers": 1024, "BLOCK": 1024}
    for kernel in (lesson.gather_kernel, lesson.scatter_kernel):
        assert_compiles(kernel, {**ends, "block_ids": ids, "num_blocks": 16, **sizes}, load_bytes=16)
    assert_compiles(lesson.gather_block_kernel, {**ends, "block_id": 1, **sizes})


# ---- the same tokens -----------------------------------------------------------------------------


def test_the_paged_model_computes_what_the_decoder_computes():
    """The blocks are anywhere, the prompt comes in two pieces, and the model writes only into its
    own blocks.
    """
    model = engines.paged_model(ARGUMENTS)
    tokens, blocks = random_prompt(50, 3), [7, 2, 9, 4]
    whole = PagedModel(model.model, 10, 64).forward(tokens, 0, [3])
    model.forward(tokens[:21], 0, blocks)
    assert torch.allclose(model.forward(tokens[21:], 21, blocks), whole, atol=1e-4)
    untouched = [block for block in range(engines.NUM_BLOCKS) if block not in blocks]
    assert not model.cache[:, untouched].any()


@pytest.fixture
def slow_link(monkeypatch):
    """Let a transfer take a fifth of a second."""
    monkeypatch.setattr(lesson, "send_data", lambda *data: (time.sleep(0.2), send_data(*data)))


@pytest.mark.usefixtures("slow_link")
def test_a_request_that_waits_for_its_blocks_lets_others_run():
    prefiller, decoder = make()
    prompt = random_prompt(100, 1)
    until_finished(prefiller, prefiller.add("r", prompt, 1, {"do_remote_decode": True}))
    remote = decoder.add("r", prompt, 2, prefiller.params["r"])
    other = decoder.add("other", random_prompt(20, 2), 4)
    decoder.step()
    assert remote.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert (other.num_output_tokens, decoder.blocks.find(remote)) == (1, []), "what has not arrived cannot be found"
    until_finished(decoder, remote, other)


@pytest.mark.usefixtures("slow_link")
def test_blocks_that_are_still_written_into_are_nobody_elses():
    """The request is aborted while it loads."""
    prefiller, decoder = make()
    prompt = random_prompt(100, 1)
    until_finished(prefiller, prefiller.add("r", prompt, 1, {"do_remote_decode": True}))
    aborted = decoder.add("r", prompt, 2, prefiller.params["r"])
    decoder.step()
    decoder.finish(aborted, RequestStatus.FINISHED_ABORTED)
    assert decoder.blocks.num_held == 7
    until = time.monotonic() + PATIENCE
    while decoder.blocks.num_held and time.monotonic() < until:
        decoder.step()
    assert (decoder.blocks.num_held, decoder.waiting) == (0, [])


@pytest.mark.parametrize("size", [0, 100, 32768 - 1, 32768 + 1])
def test_blocks_of_another_length_are_not_taken(size):
    """A peer sends too little or too much: nothing of it is written, and the read fails."""
    _, decoder = make()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        params = {"remote_host": host, "remote_port": port, "remote_request_id": "r"}
        decoder.worker.start_load([lesson.Read("r", params, [5], [1])])
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as incoming:
            assert json.loads(incoming.readline())["block_ids"] == [1]
            connection.sendall(size.to_bytes(8, "big") + b"\1" * size)
        failed = decoder.worker.failed.get(timeout=PATIENCE)
    assert failed == "r"
    assert not decoder.model.cache.any()


# ---- what the text says --------------------------------------------------------------------------


def test_layers_hide_the_transfer_by_hand():
    """Four layers compute for 10 ms each: at 8 ms of transfer a layer only the last one shows, at
    20 ms all but three computations.
    """
    assert lesson.added_seconds(40, 4 * 8, 4) == pytest.approx(8)
    assert lesson.added_seconds(40, 4 * 10, 4) == pytest.approx(10)
    assert lesson.added_seconds(40, 4 * 20, 4) == pytest.approx(50)
    assert lesson.added_seconds(40, 30, 1) == pytest.approx(30), "one layer has nothing to hide behind"


def test_ratio_by_hand():
    """The example is DistServe's, with its authors' figures."""
    assert lesson.goodput_per_gpu(5.6, 10, 2, 1) == pytest.approx(10 / 3)
    assert lesson.goodput_per_gpu(5.6, 10, 2, 1) / 1.6 == pytest.approx(2.1, abs=0.05)
    assert lesson.goodput_per_gpu(5.6, 10, 1, 3) < 1.6


def test_one_pool_wins_with_its_best_budget_and_loses_with_the_default():
    """The text's statement follows from the figures that it quotes."""
    results = REPOSITORY / "benchmarks" / "results" / "08_disaggregation.cpu.json"
    best = json.loads(results.read_text())["figures"]["ratio"]["best"]
    assert best["one"] > best["two"] > best["default"]
    assert best["budget"] in best["winning"]
    assert report.POOL_BUDGETS[-1] not in best["winning"]


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("08", tmp_path, "--prompt", "128")
    assert set(figures["interference"]) == {"alone", *map(str, interference.BUDGETS)}
    assert "ttft_ms" not in figures["interference"]["alone"]
    assert figures["servers"] == {}, "a quick run starts no servers"
    tokens, off = figures["tokens"], figures["links"]["off_mooncake"]
    moved = [
        request["bytes"] // (engines.BLOCK_SIZE * tokens["bytes_per_token"]) for request in tokens["requests"].values()
    ]
    assert moved == [7, 4, 1, 9, 2, 1], "blocks that hit in the decoder's own cache are not moved"
    assert tokens["pair"] == {"first": 13, "second": 1}, (
        "of two equal prompts the second waits for the first one's blocks"
    )
    assert tokens["bytes_per_token"] == 2048
    assert all(abs(error) < 0.25 for error in off.values()), off
    assert (figures["dies"]["held"], figures["dies"]["bytes_from_the_dead"]) == (13, 0)


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("08")
