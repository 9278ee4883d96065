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
from lessons.harness import REPOSITORY, assert_refuses, exercise_test, figures_of_quick_run, script_path
from patience import PATIENCE

from minivllm.config import EMBEDDED_MODEL, NO_PARTS
from minivllm.core.request import RequestStatus
from minivllm.kernels.copy_blocks import BlockRegions, gather_blocks, scatter_blocks
from minivllm_lab.disaggregation import report
from minivllm_lab.disaggregation.learner_connector import CAME
from minivllm_lab.disaggregation.transfer_worker import until_finished
from minivllm_lab.exercise import load, plug_of
from minivllm_lab.kernel_trace import trace_kernel
from minivllm_lab.paged_model import PagedModel

lesson = load(script_path("08"))
ARGUMENTS = Namespace(model=str(EMBEDDED_MODEL), device=torch.device("cpu"), quick=True, prompt=100, seed=0)
make = partial(lesson.two_engines, ARGUMENTS)

# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [1, 127, 128, 129])
@pytest.mark.parametrize("block_ids", [[4], [0, 8, 3], list(range(9))], ids=["one", "three", "all"])
def test_blocks_come_into_one_piece_and_back(numbers, block_ids, device):
    cache, staging, ids = (tensor.to(device) for tensor in report.transfer_case(numbers, 9, block_ids))
    gathered = lesson.launch(lesson.gather_kernel, cache, staging, ids, block=128)
    assert torch.equal(gathered, cache[:, block_ids].transpose(0, 1))
    target, order = torch.full_like(cache, -7.0), torch.tensor(block_ids[::-1], dtype=torch.int32, device=device)
    order[:1] = -1
    lesson.launch(lesson.scatter_kernel, target, gathered, order, block=128)
    expected = torch.full_like(cache, -7.0)
    expected[:, block_ids[::-1][1:]] = cache[:, block_ids[1:]]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_other_numbers_are_moved_as_they_are(dtype, device):
    cache = (100 * torch.randn(4, 5, 130)).to(dtype).to(device)
    ids = torch.tensor([3, 1], dtype=torch.int32, device=device)
    staging = lesson.launch(lesson.gather_kernel, cache, cache.new_empty(2, 4, 130), ids)
    assert torch.equal(staging, cache[:, [3, 1]].transpose(0, 1))


def test_the_engines_kernels_do_the_same(device):
    """Staged block after block, the lesson's buffer holds the same bytes as the engine's, and
    scatters back the same way.
    """
    cache, staging, ids = (tensor.to(device) for tensor in report.transfer_case(40, 9, [7, 1, 4]))
    regions = BlockRegions.of(list(cache))
    records = torch.zeros(3 * regions.record_bytes, dtype=torch.uint8, device=device)
    gather_blocks(regions, ids, records)
    mine = lesson.launch(lesson.gather_kernel, cache, staging, ids)
    assert torch.equal(mine.flatten().view(torch.uint8), records)
    source, target = torch.zeros_like(cache), torch.zeros_like(cache)
    scatter_blocks(BlockRegions.of(list(source)), ids, records)
    lesson.launch(lesson.scatter_kernel, target, mine, ids)
    assert torch.equal(target, source)


@pytest.mark.interpreted
def test_the_kernels_move_the_bytes_that_they_say():
    numbers, block_ids, block = 200, [3, 0, 5], 128
    cache, staging, ids = report.transfer_case(numbers, 6, block_ids)
    grid, moved = (3, 6, 2), 4 * numbers * 6 * 3
    trace = trace_kernel(lesson.gather_kernel, grid, staging, cache, ids, 6, numbers, BLOCK=block)
    assert (trace.arguments["cache"].bytes_read, trace.bytes_written) == (moved, moved)
    assert trace.arguments["block_ids"].bytes_read == 4 * trace.programs
    ids[1] = -1
    back = trace_kernel(lesson.scatter_kernel, grid, cache, staging, ids, 6, numbers, BLOCK=block)
    assert (back.arguments["staging"].bytes_read, back.bytes_written) == (moved * 2 // 3, moved * 2 // 3)
    assert not trace.races + back.races + trace.out_of_bounds + back.out_of_bounds


def test_the_kernels_compile():
    cache, ids = torch.zeros(4, 8, 1024), torch.zeros(16, dtype=torch.int32)
    ends, sizes = {"cache": cache, "staging": cache}, {"numbers": 1024, "BLOCK": 1024}
    for kernel in (lesson.gather_kernel, lesson.scatter_kernel):
        assert_compiles(kernel, {**ends, "block_ids": ids, "num_blocks": 16, **sizes}, load_bytes=16)
    assert_compiles(lesson.gather_block_kernel, {**ends, "block_id": 1, **sizes})


# ---- the same tokens -----------------------------------------------------------------------------


def test_two_engines_say_what_one_says():
    """Blocks that hit in the decoder's own cache are not moved, and everything is freed."""
    result = report.compare_tokens(make, lesson.through_both, ARGUMENTS)
    moved = {
        name: moved["bytes"] // (report.BLOCK_SIZE * result["bytes_per_token"])
        for name, moved in result["requests"].items()
    }
    assert list(moved.values()) == [7, 4, 1, 9, 2, 1]
    assert result["pair"] == {"first": 13, "second": 1}, (
        "the second of two equal prompts waits for the first one's blocks"
    )
    assert result["bytes_per_token"] == 2048


def test_the_paged_model_computes_what_the_decoder_computes():
    """The blocks are anywhere, the prompt comes in two pieces, and the model writes only into its
    own blocks.
    """
    model = report.paged_model(ARGUMENTS)
    tokens, blocks = report.random_prompt(50, 3), [7, 2, 9, 4]
    whole = PagedModel(model.model, 10, 64).forward(tokens, 0, [3])
    model.forward(tokens[:21], 0, blocks)
    assert torch.allclose(model.forward(tokens[21:], 21, blocks), whole, atol=1e-4)
    untouched = [block for block in range(report.NUM_BLOCKS) if block not in blocks]
    assert not model.cache[:, untouched].any()


def test_a_request_that_waits_for_its_blocks_lets_others_run():
    prefiller, decoder = make(bytes_per_second=1e6)
    prompt = report.random_prompt(100, 1)
    until_finished(prefiller, prefiller.add("r", prompt, 1, {"do_remote_decode": True}))
    remote = decoder.add("r", prompt, 2, prefiller.params["r"])
    other = decoder.add("other", report.random_prompt(20, 2), 4)
    decoder.step()
    assert remote.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert (other.num_output_tokens, decoder.blocks.find(remote)) == (1, []), "what has not arrived cannot be found"
    until_finished(decoder, remote, other)


def test_blocks_that_are_still_written_into_are_nobody_elses():
    """The request is aborted while it loads."""
    prefiller, decoder = make(bytes_per_second=1e6)
    prompt = report.random_prompt(100, 1)
    until_finished(prefiller, prefiller.add("r", prompt, 1, {"do_remote_decode": True}))
    aborted = decoder.add("r", prompt, 2, prefiller.params["r"])
    decoder.step()
    decoder.finish(aborted, RequestStatus.FINISHED_ABORTED)
    assert decoder.blocks.num_held == 7
    until = time.monotonic() + PATIENCE
    while decoder.blocks.num_held and time.monotonic() < until:
        decoder.step()
    assert (decoder.blocks.num_held, decoder.waiting) == (0, [])


def test_peers_that_die():
    result = report.break_peers(make, ARGUMENTS, lease=0.2)
    assert (result["held"], result["bytes_from_the_dead"]) == (13, 0)


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
    """The text's statement about both kinds of requests follows from the figures that it quotes."""
    results = REPOSITORY / "benchmarks" / "results" / "08_disaggregation.cpu.json"
    best = json.loads(results.read_text())["figures"]["ratio"]["best"]
    assert set(best) == set(report.WORKS)
    for kind, pair in best.items():
        assert pair["one"] > pair["two"] > pair["default"], kind
        assert pair["budget"] in pair["winning"]
        assert report.POOL_BUDGETS[-1] not in pair["winning"]


def test_the_model_of_links_beside_mooncakes():
    result = report.show_links(lesson.added_seconds)
    assert all(abs(error) < 0.25 for error in result["off_mooncake"].values()), result["off_mooncake"]


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("08", tmp_path, "--prompt", "128")
    interference = figures["interference"]
    assert set(interference) == {"alone", *map(str, report.BUDGETS)}
    assert "ttft_ms" not in interference["alone"]
    assert figures["servers"] == {}, "a quick run starts no servers"
    assert figures["kernel"]["sizes"]["1024"]["launches"] == 1
    assert figures["slow"]["bytes"] == -(-figures["slow"]["prompt"] // 16) * 16 * 2048
    assert figures["dies"]["held"] > 0


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (("--prompt", "63"), "--prompt: must be from 64 to 1900"),
        (("--prompt", "1901"), "--prompt: must be from 64 to 1900"),
        (("--model", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_gets_one_line(arguments, about):
    assert_refuses(lesson, *arguments, about=about)


# ---- the exercise --------------------------------------------------------------------------------

ASKED, TOLD, HELD = (
    f"ConnectorScheduler.{name}"
    for name in ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished")
)
OUTPUT, EXPIRED = "ConnectorScheduler.update_connector_output", "ConnectorScheduler.expired"
META = "ConnectorScheduler.build_connector_meta"
NUM_TOKENS = "num_tokens = params['remote_num_tokens'] - num_computed_tokens"
READ = "self.reads.append(Read(request.request_id, params, block_ids[first : len(remote)], remote[first:]))"
UNWANTED = "request.status.finish_reason not in ('stop', 'length')"
SOURCE = "source = cache + (tensor * num_blocks + block) * numbers + place"
STAGED = "target = staging + (index * tl.num_programs(1) + tensor) * numbers + place"

MISTAKES = {
    (ASKED, "return max(num_tokens, 0), num_tokens > 0"): {
        "never from elsewhere": "return 0, False",
        "asking is reading": (
            "self.in_flight[request.request_id] = set(missing)\nreturn max(num_tokens, 0), num_tokens > 0"
        ),
    },
    (ASKED, "request.kv_transfer_params or {}"): {"params are always there": "request.kv_transfer_params"},
    (ASKED, "params.get('do_remote_prefill')"): {
        "the key is always there": "params['do_remote_prefill']",
        "the key, not its value": "'do_remote_prefill' in params",
        "the prefiller's key": "params.get('do_remote_decode')",
        "any params will do": "params.get('remote_num_tokens')",
    },
    (ASKED, NUM_TOKENS): {
        "all tokens again": "num_tokens = params['remote_num_tokens']",
        "without the last token": "num_tokens = params['remote_num_tokens'] - num_computed_tokens - 1",
        "full blocks only": (
            "num_tokens = params['remote_num_tokens'] // self.block_size * self.block_size - num_computed_tokens"
        ),
        "whole blocks, rounded up": (
            "num_tokens = len(params['remote_block_ids']) * self.block_size - num_computed_tokens"
        ),
        "asking uses the offer up": (
            "params['do_remote_prefill'] = False\nnum_tokens = params['remote_num_tokens'] - num_computed_tokens"
        ),
        "asking counts as computing": f"request.num_computed_tokens = num_computed_tokens\n{NUM_TOKENS}",
        "all of its own prompt": "num_tokens = request.num_prompt_tokens - num_computed_tokens",
    },
    (ASKED, "num_tokens > 0"): {
        "within the step": "False",
        "nothing, but asynchronously": "True",
        "one token is nothing": "num_tokens > 1",
    },
    (ASKED, "if missing and any(...): ..."): {"nobody waits for another": ""},
    (ASKED, "return None, False"): {
        "none to be had in place of later": "return 0, False",
        "later, asynchronously": "return None, True",
    },
    (ASKED, "missing and any(...)"): {
        "any block in flight": "any(hashes & set(missing) for hashes in self.in_flight.values())",
        "whoever comes while anything is in flight": "bool(self.in_flight)",
        "a last block has a hash": "any(...)",
    },
    (ASKED, "num_computed_tokens // self.block_size"): {
        "the first block of all": "0",
        "the block after": "num_computed_tokens // self.block_size + 1",
        "blocks of four, asked": "num_computed_tokens // 4",
    },
    (ASKED, "missing[0]"): {"the last block": "missing[-1]"},
    (ASKED, "max(num_tokens, 0)"): {"not below zero forgotten": "num_tokens if num_tokens else None"},
    (TOLD, "params['do_remote_prefill'] = False"): {
        "reads again after a preemption": "",
        "a full hit may be read later": "if num_external_tokens: params['do_remote_prefill'] = False",
        "never tells of a full hit": "params['do_remote_prefill'] = False\nif not num_external_tokens: return",
    },
    (TOLD, "params['remote_num_tokens'] - num_external_tokens"): {
        "counts from the end of its own prompt": "request.num_prompt_tokens - num_external_tokens"
    },
    (TOLD, READ): {
        "cuts the table": (
            "del block_ids[len(remote) :], block_ids[:first]\n"
            "self.reads.append(Read(request.request_id, params, block_ids, remote[first:]))"
        ),
        "cuts the peer's blocks": (
            "mine = block_ids[first : len(remote)]\ndel remote[:first]\n"
            "self.reads.append(Read(request.request_id, params, mine, remote))"
        ),
        "as many as come, from the front": (
            "n = len(remote) - first\nself.reads.append(Read(request.request_id, params, block_ids[:n], remote[:n]))"
        ),
        "our missing blocks from its first ones": (
            "self.reads.append(Read(request.request_id, params, block_ids[first : len(remote)], "
            "remote[: len(remote) - first]))"
        ),
        "only full blocks are read": (
            "last = params['remote_num_tokens'] // self.block_size\n"
            "self.reads.append(Read(request.request_id, params, block_ids[first:last], remote[first:last]))"
        ),
        "the peer's name": READ.replace("request.request_id", "params['remote_request_id']"),
        "the newest read first": READ.replace("self.reads.append(", "self.reads.insert(0, "),
    },
    (TOLD, "if not params.get('do_remote_prefill'): ..."): {"reads for everybody": "if not params: return"},
    (TOLD, "len(params['remote_block_ids'])"): {"reads all on a full hit": "0"},
    (TOLD, "(params['remote_num_tokens'] - num_external_tokens) // self.block_size"): {
        "reads what is here": "0",
        "skips a block": "-(-(params['remote_num_tokens'] - num_external_tokens + 1) // self.block_size)",
        "blocks of four, read": "(params['remote_num_tokens'] - num_external_tokens) // 4",
    },
    (TOLD, "block_ids[first : len(remote)]"): {
        "room for the answer, too": "block_ids[first:]",
        "the last blocks of the table": "block_ids[first - len(remote) :]",
    },
    (TOLD, "Read(..., ..., block_ids[first : len(remote)], remote[first:])"): {
        "ours and theirs exchanged": (
            "Read(request.request_id, params, remote[first:], block_ids[first : len(remote)])"
        )
    },
    (TOLD, "self.in_flight[request.request_id] = ..."): {
        "nothing is in flight": "pass",
        "one request in flight": "self.in_flight = {request.request_id: set(request.block_hashes[first:full])}",
    },
    (TOLD, "request.block_hashes[first:full]"): {
        "all of the prompt is in flight": "request.block_hashes",
        "a block of which the peer has a part is in flight": "request.block_hashes[first : len(remote)]",
        "what the peer lacks is in flight": "request.block_hashes[first:]",
    },
    (TOLD, "if num_external_tokens: ..."): {
        "in flight without reading": (
            "if num_external_tokens:\n"
            "    first = (params['remote_num_tokens'] - num_external_tokens) // self.block_size\n"
            "self.in_flight[request.request_id] = set(request.block_hashes)"
        ),
    },
    (META, "reads, self.reads = self.reads, []"): {
        "hands over again": "reads = list(self.reads)",
        "one at a time": "reads, self.reads = self.reads[:1], self.reads[1:]",
    },
    (META, "reads, self.reads = self.reads, []\nreturn reads"): {
        "empties what it hands over": "reads = self.reads\nself.reads.clear()\nreturn reads"
    },
    (META, "return reads"): {
        "what only tells comes last": "return sorted(reads, key=lambda one: not one.block_ids)",
        "a tuple of reads": "return tuple(reads)",
    },
    (HELD, "return True, ..."): {
        "holds nothing": "return False, None",
        "holds, and tells nothing": "return True, None",
        "an offer that is none": "return True, {'remote_block_ids': block_ids[:num_blocks], **source, **self.address}",
        "one dictionary for all": (
            "self.address.update(source, do_remote_prefill=True, remote_block_ids=block_ids[:num_blocks])\n"
            "return True, self.address"
        ),
        "holds at most 256 blocks": """return True, {
            "do_remote_prefill": True, "remote_block_ids": block_ids[:num_blocks][:256], **source, **self.address}""",
    },
    (HELD, "(True, ...)"): {"tells, and does not hold": "(False, ...)"},
    (HELD, f"not params.get('do_remote_decode') or {UNWANTED}"): {
        "holds for everybody": UNWANTED,
        "holds what was aborted": "not params.get('do_remote_decode')",
    },
    (HELD, "('stop', 'length')"): {
        "a stop token is not an end": "('length',)",
        "a failure is an end": "('stop', 'length', 'error')",
    },
    (HELD, "block_ids[:num_blocks]"): {"the whole table": "block_ids"},
    (HELD, "-(-request.num_computed_tokens // self.block_size)"): {
        "full blocks are told": "request.num_computed_tokens // self.block_size",
        "one block more": "request.num_computed_tokens // self.block_size + 1",
        "blocks of four, held": "-(-request.num_computed_tokens // 4)",
        "blocks of the sampled token, too": "-(-request.num_tokens // self.block_size)",
        "blocks of the prompt only": "-(-request.num_prompt_tokens // self.block_size)",
    },
    (HELD, "self.address"): {
        "no address": "{}",
        "the other engine must hold, too": "{**self.address, 'do_remote_decode': True}",
        "an address that it knows": "{'remote_host': '10.0.0.1', 'remote_port': 5601}",
    },
    (HELD, "source = ..."): {
        "without a name": "source = {'remote_num_tokens': request.num_computed_tokens}",
        "tells tokens that it did not count": (
            "source = {'remote_request_id': request.request_id, 'remote_num_tokens': num_blocks * self.block_size}"
        ),
        "the sampled token counts, too": (
            "source = {'remote_request_id': request.request_id, 'remote_num_tokens': request.num_tokens}"
        ),
        "the prompt is all that it tells": (
            "source = {'remote_request_id': request.request_id, 'remote_num_tokens': request.num_prompt_tokens}"
        ),
        "cuts the table that is held": (
            "del block_ids[num_blocks:]\n"
            "source = {'remote_request_id': request.request_id, 'remote_num_tokens': request.num_computed_tokens}"
        ),
    },
    (HELD, "self.held[request.request_id] = ..."): {"no lease": ""},
    (HELD, "self.clock() + self.lease"): {
        "a lease that is over": "self.clock()",
        "a lease without a clock": "self.lease",
        "the usual lease": "self.clock() + 30.0",
    },
    (HELD, "if params.get('do_remote_prefill'): ..."): {
        "an unread prompt is nobody's affair": "",
        "tells the peer in any case": (
            "if 'do_remote_prefill' in params and 'remote_block_ids' in params:\n"
            "    self.reads.append(Read(request.request_id, params))"
        ),
    },
    (HELD, "Read(request.request_id, params)"): {
        "reads for a request that is gone": (
            "Read(request.request_id, params, list(params['remote_block_ids']), params['remote_block_ids'])"
        )
    },
    (HELD, "params.get('do_remote_prefill')"): {
        "an abort is told, although it is being read": (
            "params.get('do_remote_prefill') or "
            "('remote_block_ids' in params and request.status.finish_reason == 'abort')"
        ),
    },
    (OUTPUT, "self.held.pop(name, None)"): {
        "what was sent stays held": "pass",
        "only those that it knows": "self.held.pop(name)",
    },
    (OUTPUT, "self.in_flight.pop(name, None)"): {
        "what was received stays in flight": "pass",
        "only reads that it knows": "self.in_flight.pop(name)",
        "what was received is no longer held": "self.in_flight.pop(name, None), self.held.pop(name, None)",
        "all at once": "self.in_flight.clear()",
    },
    (OUTPUT, "for name in finished_sending: ...\nfor name in finished_recving: ..."): {
        "sent and received exchanged": (
            "for name in finished_recving: self.held.pop(name, None)\n"
            "for name in finished_sending: self.in_flight.pop(name, None)"
        ),
    },
    (EXPIRED, "return late"): {
        "never over": "return []",
        "a set of names": "return set(late)",
    },
    (EXPIRED, "until <= self.clock()"): {
        "over before its time": "until <= self.clock() + 1",
        "over after its time": "until < self.clock()",
        "in whole seconds": "int(until) <= int(self.clock())",
        "rounded": "round(until) <= round(self.clock())",
    },
    (EXPIRED, "self.update_connector_output(late, ())"): {
        "named again": "",
        "forgets those that are not over": "self.held.clear()",
    },
    (EXPIRED, "late = ..."): {
        "everybody if one is": (
            "late = list(self.held) if any(until <= self.clock() for until in self.held.values()) else []"
        ),
        "one lease in a call": "late = (...)[:1]",
    },
    ("gather_block_kernel", "tl.load(source, mask=place < numbers)"): {"one block: no mask": "tl.load(source)"},
    ("gather_block_kernel", "tl.cast(block_id, tl.int64) * numbers"): {
        "one block: always the first": "0",
        "one block: ids of a byte": "block_id % 256 * numbers",
        "one block: blocks of BLOCK": "block_id * BLOCK",
    },
    ("gather_block_kernel", "tl.program_id(0) * BLOCK"): {"one block: the first program only": "0"},
    ("gather_block_kernel", "tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)"): {
        "one block: programs of eight": "tl.program_id(0) * 8 + tl.arange(0, 8)"
    },
    ("gather_block_kernel", "tl.store(staging + place, ..., mask=place < numbers)"): {
        "one block: the first program does it all": (
            "if tl.program_id(0) == 0:\n"
            "    for part in range(tl.cdiv(numbers, BLOCK)):\n"
            "        rest = place + part * BLOCK\n"
            "        tl.store(staging + rest, tl.load(source + part * BLOCK, mask=rest < numbers), mask=rest < numbers)"
        ),
    },
    ("gather_kernel", "tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)"): {
        "gather: programs of eight": "tl.program_id(2) * 8 + tl.arange(0, 8)"
    },
    ("gather_kernel", "tl.store(target, ..., mask=place < numbers)"): {
        "gather: a program for each block": (
            "if tl.program_id(2) == 0:\n"
            "    for part in range(tl.cdiv(numbers, BLOCK)):\n"
            "        kept = place + part * BLOCK < numbers\n"
            "        tl.store(target + part * BLOCK, tl.load(source + part * BLOCK, mask=kept), mask=kept)"
        ),
        "gather: writes beyond": "tl.store(target, ...)",
    },
    ("gather_kernel", "tl.load(block_ids + index)"): {
        "gather: places, not blocks": "index",
        "gather: ids in half precision": "tl.load(block_ids + index).to(tl.float16)",
    },
    ("gather_kernel", "tensor * num_blocks + block"): {
        "gather: one tensor": "block",
        "gather: tensors as far apart as wanted blocks": "tensor * tl.num_programs(0) + block",
        "gather: the cache block after block": "block * tl.num_programs(1) + tensor",
    },
    ("gather_kernel", "index * tl.num_programs(1) + tensor"): {
        "gather: tensor after tensor": "tensor * tl.num_programs(0) + index",
        "gather: to the block's own place": "block * tl.num_programs(1) + tensor",
    },
    ("gather_kernel", "tl.load(source, mask=place < numbers)"): {"gather: no mask": "tl.load(source)"},
    ("gather_kernel", "tl.program_id(2) * BLOCK"): {"gather: one part": "0"},
    ("scatter_kernel", "block >= 0"): {
        "scatter: -1 is the last block": "block >= -1",
        "scatter: block 0 is none": "block > 0",
    },
    ("scatter_kernel", "target = cache + (tensor * num_blocks + block) * numbers + place"): {
        "scatter: places, not blocks": "target = cache + (tensor * num_blocks + index) * numbers + place"
    },
    ("scatter_kernel", "index * tl.num_programs(1) + tensor"): {
        "scatter: tensor after tensor": "tensor * tl.num_programs(0) + index"
    },
    ("scatter_kernel", "tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)"): {
        "scatter: programs of eight": "tl.program_id(2) * 8 + tl.arange(0, 8)"
    },
    ("scatter_kernel", "tl.store(target, tl.load(source, mask=place < numbers), mask=place < numbers)"): {
        "scatter: no mask": "tl.store(target, tl.load(source))"
    },
}
"""For (function, its code): what it is replaced by, under the name of the mistake."""
MUTANTS = {mistake: (*where, instead) for where, mistakes in MISTAKES.items() for mistake, instead in mistakes.items()}

MESSAGES = {
    "without the last token": "that it is computed again is the scheduler's affair",
    "all tokens again": "what is computed here need not come",
    "reads again after a preemption": "the peer has freed its blocks",
    "never tells of a full hit": "the peer holds its blocks until it is told",
    "an unread prompt is nobody's affair": "the peer must be told",
    "room for the answer, too": "not one for one",
    "asking counts as computing": "asking changes nothing",
    "cuts the table": "it is the scheduler's",
    "a full hit may be read later": "it is told again when the request ends",
    "holds what was aborted": "finish_reason 'abort'",
    "no lease": "is right",
    "gather: tensor after tensor": "all of a block must stand together",
    "one block: no mask": "are enough",
}

test_the_checks_catch = exercise_test("08", MUTANTS, MESSAGES)


def test_two_engines_run_with_the_learners_connector():
    """The tokens are those of one engine; all but the cached part of each prompt comes from the
    other; all blocks are free.
    """
    plugged = plug_of("08")(load(script_path("08")))
    yours, ours = (plugged.serve(plugged, parts) for parts in (plugged.parts, NO_PARTS))
    assert (yours.token_ids, yours.equal) == (ours.token_ids, ours.equal)
    assert (yours.rows[CAME], ours.rows[CAME]) == (5, 0)


def test_no_answer_of_the_exercise_stands_before_it():
    before = (REPOSITORY / "lessons" / "08_disaggregation.md").read_text().partition("## Build it")[0]
    assert "@triton.jit" not in before
    assert "def request_finished" not in before
