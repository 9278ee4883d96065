"""Lesson 02: sharing changes the blocks but not the text, the kernels are right, the exercise
catches mistakes.
"""

import json

import pytest
import torch
from kernels.harness import assert_compiles
from lessons.harness import REPOSITORY, SMALL, exercise_test, figures_of_quick_run, script_path
from refusals import assert_refused

from minivllm.models.attention import CausalAttention
from minivllm.models.loader import random_model
from minivllm_lab.exercise import load
from minivllm_lab.paged_attention import holes, opening, shared_blocks
from minivllm_lab.paged_attention.allocators import Buddy, FirstFit
from minivllm_lab.paged_attention.beam_search import beam_search, beams_both_ways, full_copy, saved_by_samples
from minivllm_lab.paged_attention.memory_replay import Running, replay
from minivllm_lab.paged_attention.paged_cache import PagedCache, blocks_held, in_blocks
from minivllm_lab.paged_attention.report import PROMPT, STRANGER
from minivllm_simulate.workloads import RequestLengths, workload

lesson = load(script_path("02"))
lesson_01 = load(script_path("01"))
PAPER = {"max": (0.204, 7.00), "pow2": (0.268, 9.81), "oracle": (0.382, 13.62), "paged": (0.963, 30.42)}
"""Share of the slots that hold a token, and requests at once: Kwon et al. 2023, figures 2 and 13, on
ShareGPT.
"""


# ---- reservations --------------------------------------------------------------------------------


def running(prompt, output):
    return Running(RequestLengths(prompt, output), prompt)


def test_free_memory_in_two_holes_is_no_room():
    """External fragmentation: 40 slots are free, yet a request of 30 must wait."""
    memory = FirstFit(60, lambda request: request.total)
    kept = [running(20, 0) for _ in range(3)]
    assert all(memory.admit(entry) for entry in kept)
    memory.release(kept[0])
    memory.release(kept[2])
    assert not memory.admit(running(30, 0))
    memory.release(kept[1])
    assert memory.admit(running(30, 0))


def test_buddies_are_powers_of_two_at_multiples_of_their_length():
    memory = Buddy(100, lambda request: request.total)
    kept = [running(10, 10), running(1, 0), running(30, 3)]
    assert all(memory.admit(entry) for entry in kept)
    assert [entry.home for entry in kept] == [(64, 32, 20), (96, 1, 1), (0, 64, 33)]
    assert memory.free == {(1, 97), (2, 98)}
    assert not memory.admit(running(3, 0)), "three slots are free, and no piece of four"


def test_the_replay_finds_what_the_paper_found():
    """The share of memory that holds tokens and the requests that run agree with Kwon et al. 2023,
    figures 2 and 13.
    """
    requests = [request for request in workload("sharegpt").sample(15_696) if request.total <= 2048]
    kinds = {**lesson.RESERVATIONS, "paged": lambda slots: lesson.paged(slots, 16)}
    replayed = {kind: replay(make(15_696), requests, 2000) for kind, make in kinds.items()}
    for kind, (tokens, running_at_once) in PAPER.items():
        assert replayed[kind].tokens == pytest.approx(tokens, abs=0.05)
        assert replayed[kind].running == pytest.approx(running_at_once, rel=0.12)
    shares = [replayed[kind].tokens for kind in ("max", "pow2", "oracle", "exact", "paged")]
    assert shares == sorted(shares)
    assert replayed["oracle"].never == replayed["exact"].never == 0
    assert replayed["max"].evicted == 0
    for outcome in replayed.values():
        assert outcome.tokens + outcome.later + outcome.never + outcome.outside == pytest.approx(1)


def test_one_request_after_the_other():
    """There is room for one request of 3 + 1 tokens: admitted with 3, it grows once and leaves; the
    next comes a step later.
    """
    result = replay(lesson.paged(4, 1), [RequestLengths(3, 1)] * 100, 120)
    assert (result.running, result.evicted) == (1, 0)
    assert result.served_per_1000_steps == pytest.approx(500, rel=0.03)
    assert result.tokens == pytest.approx(3.5 / 4, rel=0.01)


def test_the_last_one_admitted_gives_way_and_keeps_its_tokens():
    """The second request waits for the first, with its prompt and what it has generated."""
    memory, admitted = lesson.paged(8, 1), []
    admit = memory.admit
    memory.admit = lambda request: admit(request) and not admitted.append((request.lengths, request.tokens))
    assert replay(memory, [RequestLengths(3, 5), RequestLengths(3, 4)] * 60, 80).evicted > 0
    assert (RequestLengths(3, 4), 4) in admitted, "admitted again"


def test_what_cannot_be_replayed_is_refused():
    assert_refused("does not fit alone", replay, lesson.paged(4, 1), [RequestLengths(9, 1)], 10)
    assert_refused("pass more requests", replay, lesson.paged(100, 1), [RequestLengths(1, 1)] * 3, 10)


# ---- the cache: sharing changes the blocks and not the text --------------------------------------


def small_cache(blocks=64, block_size=4):
    return lesson.paged_cache(random_model(SMALL, dtype="float32"), blocks, block_size)


@pytest.mark.parametrize(("width", "block_size"), [(1, 16), (2, 1), (5, 3)])
def test_beams_are_the_same_with_and_without_sharing(width, block_size):
    prompt = [5, 6, 7, 8, 9, 10, 11]
    cache, copying = small_cache(400, block_size), small_cache(400, block_size)
    shared, held = beam_search(cache, prompt, width, 12, lesson.BlockTable.fork)
    alone, held_alone = beam_search(copying, prompt, width, 12, lambda parent: full_copy(copying, parent))
    assert [(beam.tokens, beam.score) for beam in shared] == [(beam.tokens, beam.score) for beam in alone]
    assert held_alone == [(width if step else 1) * -(-(7 + step) // block_size) for step in range(12)]
    assert all(less <= more for less, more in zip(held, held_alone, strict=True))
    assert width == 1 or sum(held) < sum(held_alone)
    for beam in shared:
        assert cache.tokens_of(beam.table) == prompt + beam.tokens[:-1]
        beam.table.free()
    assert blocks_held(cache.pool) == 0, "a beam search leaks no block"


def test_beams_are_the_likeliest_texts():
    """Width 128 over two steps keeps every first token, so the best pair of all 16,384 is found."""
    cache = small_cache(600)
    beams, _ = beam_search(cache, [7, 8, 9], 128, 2, lesson.BlockTable.fork)
    scores = torch.empty(128, 128)
    for first in range(128):
        texts = torch.tensor([7, 8, 9, first])
        hidden = cache.model(texts, torch.arange(4), CausalAttention(SMALL))
        logits = cache.model.compute_logits(hidden).log_softmax(-1)
        scores[first] = logits[2, first] + logits[3]
    best = scores.flatten().argmax().item()
    assert beams[0].tokens == [best // 128, best % 128]
    assert beams[0].score == pytest.approx(scores.max().item(), abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "output", "samples", "saved"),
    [
        (32, 16, 2, 1 - 4 / 6),  # blocks of 16: 2 shared and 1 of each sample, of 3 each, at every step
        (32, 16, 1, 0),
        (24, 8, 2, 1 - 3 / 4),  # the half full block is copied: 1 shared and 1 of each, of 2 each
    ],
)
def test_samples_share_their_prompt_by_arithmetic(prompt, output, samples, saved):
    def new_table(blocks, block_size):
        return lesson.BlockTable(lesson.BlockPool(blocks), block_size)

    assert saved_by_samples([RequestLengths(prompt, output)], samples, 16, new_table) == pytest.approx(saved)


@pytest.mark.parametrize("name", ["sharegpt", "alpaca"])
def test_many_requests_save_what_the_notes_say(name):
    """Use the arithmetic above: all samples but one save the prompt's full blocks."""
    full = held = 0
    for lengths in workload(name).sample(2000):
        full += lengths.output_tokens * (lengths.prompt_tokens // 16)
        held += sum(-(-tokens // 16) for tokens in range(lengths.prompt_tokens + 1, lengths.total + 1))
    notes = " ".join((REPOSITORY / "lessons/notes/02_paged_attention.md").read_text().split())
    assert f"save {100 / 2 * full / held:.1f} to {500 / 6 * full / held:.1f} %" in notes


def test_beams_that_differ_are_no_result(monkeypatch):
    """A child that reads a past other than its parent's must not count as a saving."""
    assert beams_both_ways(lambda: small_cache(400), [5, 6, 7, 8, 9], [2], 6)["2"]["saved"] > 0
    monkeypatch.setattr(PagedCache, "copy", lambda cache, copies: None)
    with pytest.raises(AssertionError, match="sharing changed the beams"):
        beams_both_ways(lambda: small_cache(400), [5, 6, 7, 8, 9], [2], 6)


# ---- kernels -------------------------------------------------------------------------------------


def test_the_scripts_own_proof_holds(device):
    """It compares with float64; `test_every_lesson.py` has the exercise's checks of the gathers."""
    assert lesson.verify_kernels(device)["largest_error"] < 2e-3


def test_where_the_slots_are_is_all_that_differs_from_lesson_01(device):
    """The kernel without the table is lesson 01's; with one block per sequence, the table changes
    no bit.
    """
    lengths = torch.tensor([1, 40, 64], dtype=torch.int32, device=device)
    keys, values = torch.randn(2, 3, 64, 2, 64, device=device)
    q, table = torch.randn(3, 6, 64, device=device), torch.arange(3, dtype=torch.int32, device=device)[:, None]
    last = torch.arange(3, device=device), lengths.long() - 1  # lesson 01 writes the last token, then attends
    expected = lesson_01.decode_batch(q, keys[last], values[last], keys.clone(), values.clone(), lengths - 1)
    assert torch.equal(lesson.paged_decode(q, keys, values, table, lengths, paged=False), expected)
    assert torch.equal(lesson.paged_decode(q, keys, values, table, lengths), expected)
    blocks, scattered = in_blocks(torch.stack([keys, values]), 4)
    assert torch.equal(lesson.paged_decode(q, *blocks, scattered, lengths), expected)


@pytest.mark.parametrize(("block_size", "paged"), [(1, True), (16, True), (4096, False)])
def test_decode_kernel_compiles_everywhere(block_size, paged):
    pointers = dict.fromkeys(("out", "q", "keys", "values"), "*bf16")
    assert_compiles(
        lesson.paged_decode_kernel,
        {
            **pointers, "block_table": "*i32", "lengths": "*i32", "table_width": 128, "scale": 0.1, "GROUP": 4,
            "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": block_size, "BLOCK_D": 128, "BLOCK_T": lesson.BLOCK_T,
            "PAGED": paged,
        },
        load_bytes=16,
    )  # fmt: skip


def test_gather_kernel_compiles_everywhere():
    pointers = {"out": "*bf16", "cache": "*bf16", "starts": "*i32", "block_table": "*i32", "lengths": "*i32"}
    sizes = {"width": 128, "BLOCK_SIZE": 16, "WIDTH": 1024}
    assert_compiles(lesson.gather_cache_kernel, {**pointers, **sizes}, load_bytes=16)


# ---- the pictures --------------------------------------------------------------------------------


def test_the_opening_figure_says_what_the_text_carries_by_hand():
    captions = opening.frames().captions
    assert "9 tokens take 3 blocks: the table is 1, 2, 3" in captions[0]
    assert "slot 16 is taken, so entry 3 of the table becomes block 9: slot 36" in captions[4]
    assert "slot 37" in captions[5]
    assert "14 tokens in blocks 1, 2, 3, 9" in captions[6]
    assert opening.stills()["slot_16"] == opening.frames().still(4)


def held_slots(lives):
    """Return (step, slot) for each slot that a request holds in a step."""
    return [
        (step, slot)
        for (_, first, slots), life in lives.items()
        for slot in range(first, first + slots)
        for step, _ in life
    ]


def starts(lives):
    """Return the step in which each request starts."""
    return {name: life[0][0] for (name, *_), life in reversed(lives.items())}


def test_in_regions_a_request_waits_although_enough_is_free():
    """The text says: twenty slots in two holes, H needs fourteen; in blocks it runs eight steps
    earlier.
    """
    regions, blocks = holes.contiguous(), holes.paged()
    held = {slot for step, slot in held_slots(regions) if step == holes.MOMENT}
    free = [slot for first, end in holes.HOLES for slot in range(first, end)]
    assert free == [slot for slot in range(holes.SLOTS) if slot not in held]
    assert [end - first for first, end in holes.HOLES] == [12, 8]
    assert sum(holes.STREAM["H"][1:]) == 14
    assert starts(regions)["H"] == 20 > holes.MOMENT
    assert starts(regions)["G"] < holes.MOMENT, "so H is the first that waits"
    assert starts(blocks) == {name: arrival for name, (arrival, *_) in holes.STREAM.items()}, "none waits"


@pytest.mark.parametrize("serve", [holes.contiguous, holes.paged])
def test_no_slot_of_the_picture_is_held_twice(serve):
    held = held_slots(serve())
    assert len(set(held)) == len(held)


def test_copy_on_write_is_drawn_as_the_pool_does_it():
    pool = lesson.BlockPool(5)
    a = lesson.BlockTable(pool, 4)
    b = lesson.BlockTable(pool, 4)

    def fork():
        b.blocks, b.num_tokens = a.fork().blocks, a.num_tokens

    acts = (lambda: a.append(9), fork, lambda: a.append(1), lambda: b.append(1), a.free)
    for act, moment in zip(acts, shared_blocks.MOMENTS.values(), strict=True):
        act()
        assert [len(readers) for readers, _ in moment] == [block.ref_cnt for block in pool.blocks[1:]]
        for name, table in (("A", a), ("B", b)):
            drawn = [number for number, (readers, _) in enumerate(moment, start=1) if name in readers]
            assert drawn == sorted(table.block_ids())
            text = "".join(moment[block - 1][1] for block in table.block_ids())
            assert text == "".join(map(str, range(table.num_tokens)))


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("02")


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("02", tmp_path)
    kinds = figures["memory"]["sharegpt"]
    assert kinds["max"]["tokens"] < 0.25 < 0.9 < kinds["paged"]["tokens"]
    broken = figures["broken"]
    assert broken == json.loads(shared_blocks.RESULTS.read_text())["figures"]["broken"], "as the text quotes it"
    assert broken["double_free"] == [1, 2, 3], "two requests get the same blocks"
    assert broken["counted"]["reads"] == PROMPT
    assert STRANGER[:15] in broken["forgotten"]["reads"]
    assert set(figures["blocks"]["price"]["ratio"]) == {"1", "16", "512"}
    assert figures["sharing"]["beams"]["4"]["saved"] > 0.2
