"""Lesson 02: sharing changes the blocks and not the text, the kernels are right, the exercise catches mistakes."""

import pytest
import torch
from kernels.harness import (
    assert_close,
    assert_compiles,
    awkward_lengths,
    gather_paged,
    random_block_table,
    reference_attention,
    start_locations,
)
from lessons.harness import (
    assert_refuses,
    checks_that_catch,
    figures_of_quick_run,
    script_path,
)

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError
from minivllm.kernels import reshape_and_cache as engine_cache
from minivllm.kernels.unified_attention import unified_attention
from minivllm.lab.allocators import Reservations
from minivllm.lab.beam_search import beam_search, beams_both_ways, full_copy, saved_by_samples, share
from minivllm.lab.exercise import load
from minivllm.lab.paged_cache import PagedCache, blocks_held, gather_decode, in_blocks
from minivllm.lab.reports.paged_attention import PROMPT
from minivllm.models.attention import CausalAttention
from minivllm.models.loader import random_model
from minivllm.simulate.memory_replay import Running, TablesOnDemand, replay
from minivllm.simulate.workloads import RequestLengths, workload

lesson = load(script_path("02"))
lesson_01 = load(script_path("01"))

SMALL = ModelConfig(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64,
    intermediate_size=96, vocab_size=128, max_position_embeddings=256, model_type="llama",
)  # fmt: skip


# ---- reservations ----------------------------------------------------------------------------------------------------


def running(prompt, output):
    return Running(RequestLengths(prompt, output), prompt)


def test_regions_never_overlap_and_leave_one_hole():
    memory = Reservations(100, lambda request: request.total)
    kept = [running(10, 10), running(20, 10), running(5, 5), running(30, 10)]
    assert all(memory.admit(one) for one in kept)
    taken = [slot for one in kept for slot in range(one.home[0], sum(one.home))]
    assert sorted(taken) == list(range(100))
    assert not memory.admit(running(1, 0)), "the memory is full"
    for one in (kept[1], kept[3], kept[2], kept[0]):
        memory.release(one)
    assert memory.taken == []
    assert memory.admit(running(60, 40)), "the holes are one again"


def test_free_memory_in_two_holes_is_no_room():
    """External fragmentation: 40 slots are free, and a request of 30 must wait."""
    memory = Reservations(60, lambda request: request.total)
    kept = [running(20, 0) for _ in range(3)]
    assert all(memory.admit(one) for one in kept)
    memory.release(kept[0])
    memory.release(kept[2])
    assert not memory.admit(running(30, 0))
    memory.release(kept[1])
    assert memory.admit(running(30, 0))


def test_the_replay_finds_what_the_paper_found():
    """Kwon et al. 2023, figures 2 and 13: 20.4 % and 96.3 % of the memory hold tokens; 7.00 and 30.42 requests run."""
    requests = [one for one in workload("sharegpt").sample(12_000) if one.total <= 2048]
    reserved = replay(Reservations(15_696, lesson.REGIONS["max"]), requests, 1600)
    blocks = replay(lesson.paged(15_696, 16), requests, 1600)
    assert reserved.tokens == pytest.approx(0.204, abs=0.03)
    assert reserved.running == pytest.approx(7.0, abs=0.05)
    assert blocks.tokens == pytest.approx(0.963, abs=0.02)
    assert blocks.running == pytest.approx(30.42, rel=0.1)


def test_every_allocator_serves_the_same_requests_and_blocks_hold_most():
    requests = [one for one in workload("azure-conversation").sample(2000) if one.total <= 2048]
    found = {kind: replay(Reservations(15_696, rule), requests, 400) for kind, rule in lesson.REGIONS.items()}
    blocks = replay(lesson.paged(15_696, 16), requests, 400)
    assert max(one.tokens for one in found.values()) < blocks.tokens
    assert found["exact"].never == 0
    assert found["max"].evicted == 0
    for one in (*found.values(), blocks):
        assert one.tokens + one.later + one.never + one.outside == pytest.approx(1)


# ---- the cache: sharing changes the blocks and not the text ----------------------------------------------------------


def small_cache(blocks=64, block_size=4):
    return lesson.paged_cache(random_model(SMALL, dtype="float32"), blocks, block_size)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_logits_are_those_of_the_whole_text(block_size):
    cache, text = small_cache(block_size=block_size), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    one = cache.table()
    cache.forward([one], [text[:6]])
    for index in range(6, len(text)):
        logits = cache.forward([one], [text[index : index + 1]])
        positions = torch.arange(index + 1)
        whole = cache.model(torch.tensor(text[: index + 1]), positions, CausalAttention(SMALL))
        assert_close(logits, cache.model.compute_logits(whole[-1:]))
    assert cache.tokens_of(one) == text


def test_sequences_of_a_batch_do_not_see_each_other():
    cache = small_cache()
    texts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
    tables = [cache.table() for _ in texts]
    for one, text in zip(tables, texts, strict=True):
        cache.forward([one], [text])
    together = cache.forward(tables, [[11], [12], [13]])
    for row, text, new in zip(together, texts, (11, 12, 13), strict=True):
        alone = small_cache()
        one = alone.table()
        alone.forward([one], [text])
        assert_close(row, alone.forward([one], [[new]])[0])


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_beams_are_the_same_with_and_without_sharing(width, block_size):
    prompt = [5, 6, 7, 8, 9, 10, 11]
    cache, copying = small_cache(400, block_size), small_cache(400, block_size)
    shared, held = beam_search(cache, prompt, width, 12, share)
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
    beams, _ = beam_search(cache, [7, 8, 9], 128, 2, share)
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


def test_beams_that_differ_are_no_result(monkeypatch):
    """A child that reads another past than its parent's must not pass for a saving."""
    assert beams_both_ways(lambda: small_cache(400), [5, 6, 7, 8, 9], [2], 6)[0]["2"]["saved"] > 0
    monkeypatch.setattr(PagedCache, "copy", lambda cache, copies: None)
    with pytest.raises(AssertionError, match="sharing changed the beams"):
        beams_both_ways(lambda: small_cache(400), [5, 6, 7, 8, 9], [2], 6)


# ---- break it --------------------------------------------------------------------------------------------------------


def test_a_forgotten_reference_shows_the_strangers_text():
    mine, stranger = list(range(10, 22)), list(range(60, 72))
    reads, writes = lesson.leak(small_cache(), mine, stranger, 4)
    assert reads == mine
    careless = small_cache()
    careless.pool.touch = lambda blocks: None
    stolen, other = lesson.leak(careless, mine, stranger, 4)
    assert set(stolen) <= set(stranger) | set(other)
    assert len(set(stolen) & set(stranger)) >= 8, "the prompt's blocks hold the stranger's text"
    assert len(writes) == len(other) == 4
    assert other != writes


def test_a_double_free_is_refused_and_would_share_blocks():
    with pytest.raises(MinivllmError, match="double free of block"):
        lesson.double_free(lesson.BlockPool(9))
    trusting = lesson.BlockPool(9)
    trusting.free_blocks = lambda blocks: trusting.free.extendleft(list(blocks)[::-1])
    assert lesson.double_free(trusting) == [1, 2, 3]


# ---- kernels ---------------------------------------------------------------------------------------------------------


def paged_case(lengths, block_size, heads, kv_heads, head_dim, dtype, device):
    """q, caches, table, lengths; slots that hold no token of anybody hold NaN, which must never be read."""
    table, blocks = random_block_table(lengths, block_size)
    caches = torch.full((2, blocks, block_size, kv_heads, head_dim), torch.nan)
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        where = table[row].long()[positions // block_size], positions % block_size
        for cache in caches:
            cache[where] = torch.randn(length, kv_heads, head_dim)
    q = torch.randn(len(lengths), heads, head_dim).to(device, dtype)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    return q, *caches.to(device, dtype), table.to(device), counts


@pytest.mark.parametrize(
    ("block_size", "heads", "kv_heads", "head_dim", "dtype"),
    [
        (16, 4, 4, 64, torch.float32),
        (1, 6, 2, 80, torch.float16),
        (5, 8, 1, 128, torch.float32),
        (64, 7, 1, 64, torch.float16),
        (512, 3, 3, 16, torch.float32),
    ],
)
def test_decode_through_a_table(block_size, heads, kv_heads, head_dim, dtype, device):
    torch.manual_seed(0)
    lengths = awkward_lengths(min(block_size, lesson.BLOCK_T) + 1)
    q, keys, values, table, counts = paged_case(lengths, block_size, heads, kv_heads, head_dim, dtype, device)
    out = lesson.paged_decode(q, keys, values, table, counts)
    for row, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(out[row], torch.zeros_like(out[row]))
            continue
        k, v = (gather_paged(cache, table, row, length) for cache in (keys, values))
        assert_close(out[row], reference_attention(q[row, None], k, v, head_dim**-0.5)[0])


def test_where_the_slots_are_is_all_that_differs_from_lesson_01(device):
    """Without the table the kernel is lesson 01's; with one block a sequence the table changes no bit."""
    lengths = torch.tensor([1, 40, 64], dtype=torch.int32, device=device)
    keys, values = torch.randn(2, 3, 64, 2, 64, device=device)
    q, table = torch.randn(3, 6, 64, device=device), torch.arange(3, dtype=torch.int32, device=device)[:, None]
    last = torch.arange(3, device=device), lengths.long() - 1  # lesson 01 writes the last token, then attends
    expected = lesson_01.decode_batch(q, keys[last], values[last], keys.clone(), values.clone(), lengths - 1)
    assert torch.equal(lesson.paged_decode(q, keys, values, table, lengths, paged=False), expected)
    assert torch.equal(lesson.paged_decode(q, keys, values, table, lengths), expected)
    blocks, scattered = in_blocks(torch.stack([keys, values]), 4)
    assert torch.equal(lesson.paged_decode(q, *blocks, scattered, lengths), expected)


def test_decode_is_what_the_engines_kernel_does(device):
    lengths = [1, 17, 33, 90]
    q, keys, values, table, counts = paged_case(lengths, 16, 8, 2, 64, torch.float32, device)
    keys, values = keys.nan_to_num(), values.nan_to_num()
    starts = start_locations([1] * 4, device)
    engine = unified_attention(q, keys, values, starts, counts, table, 64**-0.5, backend="triton")
    assert_close(lesson.paged_decode(q, keys, values, table, counts), engine)
    assert_close(gather_decode(q, keys, values, table, counts), engine)


@pytest.mark.parametrize("shape", [(1, 4, 1, 16), (16, 2, 80), (3, 1, 8), (512, 2, 2)])
def test_copies_are_the_engines_and_touch_nothing_else(shape, device):
    cache = torch.randn(3, 9, *shape, device=device)
    copies, expected = [(1, 2), (1, 7), (5, 8), (3, 4)], cache.clone()
    for plane in expected:
        engine_cache.copy_blocks(plane, plane, torch.tensor(copies, device=device))
    lesson.copy_blocks(cache, copies)
    assert torch.equal(cache, expected)
    lesson.copy_blocks(cache, [])
    assert torch.equal(cache, expected)


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


def test_copy_kernel_compiles_everywhere():
    sizes = {"num_blocks": 4096, "SIZE": 16 * 8 * 128, "CHUNK": 2048}
    assert_compiles(lesson.copy_blocks_kernel, {"cache": "*bf16", "pairs": "*i32", **sizes}, load_bytes=16)


# ---- the exercise ----------------------------------------------------------------------------------------------------

MUTANTS = {
    "takes the place in the table for the block": (
        "slot_mapping",
        "block_ids[position // block_size] * block_size",
        "(position // block_size) * block_size",
    ),
    "forgets the place in the block": ("slot_mapping", "... + position % block_size", "..."),
    "hands out the null block": ("BlockPool.__init__", "self.blocks[1:]", "self.blocks"),
    "takes what there is": (
        "BlockPool.get_new_blocks",
        "if num_blocks > len(self.free): ...",
        "num_blocks = min(num_blocks, len(self.free))",
    ),
    "does not count a fork": ("BlockPool.touch", "block.ref_cnt += 1", ""),
    "frees what is shared": (
        "BlockPool.free_blocks",
        "if block.ref_cnt == 0: free.append(block)",
        "if block.ref_cnt >= 0: free.append(block)",
    ),
    "frees twice": ("BlockPool.free_blocks", "if block.ref_cnt == 0: raise ...", ""),
    "reuses last what was freed": (
        "BlockPool.free_blocks",
        "self.free.extendleft(reversed(free))",
        "self.free.extend(free)",
    ),
    "turns the order round": ("BlockPool.free_blocks", "reversed(free)", "free"),
    "writes into what others read": ("BlockTable.must_copy", "....ref_cnt > 1", "....ref_cnt > 2"),
    "copies although nobody shares": ("BlockTable.must_copy", "....ref_cnt > 1", "....ref_cnt > 0"),
    "copies full blocks": ("BlockTable.must_copy", "self.num_tokens % self.block_size > 0", "True"),
    "does not say what to copy": ("BlockTable.append", "copies.append(...)", ""),
    "copies the wrong way": (
        "BlockTable.append",
        "(shared.block_id, own.block_id)",
        "(own.block_id, shared.block_id)",
    ),
    "keeps hold of what it copied": ("BlockTable.append", "self.pool.free_blocks([shared])", ""),
    "gives both tables one list": ("BlockTable.fork", "list(self.blocks)", "self.blocks"),
    "frees the head first": ("BlockTable.free", "reversed(self.blocks)", "self.blocks"),
}


@pytest.mark.parametrize("mistake", MUTANTS)
def test_the_checks_catch(mistake):
    assert checks_that_catch("02", MUTANTS[mistake])


# ---- the script from outside -----------------------------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("02", tmp_path)
    kinds = figures["memory"]["sharegpt"]
    assert kinds["max"]["tokens"] < 0.25 < 0.9 < kinds["paged"]["tokens"]
    assert figures["broken"]["counted"]["reads"] == PROMPT
    assert figures["broken"]["forgotten"]["reads"] != PROMPT
    assert set(figures["blocks"]["price"]["ratio"]) == {"1", "16", "512"}
    assert figures["sharing"]["beams"]["4"]["saved"] > 0.2


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (("--block-size", "0"), "at least 1"),
        (("--slots", "100"), "--slots must be 2,048"),
        (("--slots", "2100", "--block-size", "1500"), "--slots must be 3,000"),
        (("--slots", "1000000000000"), "--slots"),
        (("--block-size", "4096"), "--block-size"),
        (("--beam-width", "0"), "at least 1"),
        (("--beam-width", "1000"), "--beam-width must be at most 64"),
        (("--model", "nowhere"), "nowhere"),
        (("--prompt", ""), "prompt"),
        (("--stranger", "x " * 3000), "prompt"),
    ],
)
def test_bad_input_gets_one_line(arguments, about):
    assert_refuses(lesson, *arguments, about=about)


def test_tables_on_demand_take_no_block_they_do_not_need():
    memory = lesson.paged(64, 16)
    one = running(17, 10)
    assert isinstance(memory, TablesOnDemand)
    assert memory.admit(one)
    assert memory.held(one) == 32
    assert not memory.admit(running(40, 1)), "two blocks are left"
    memory.release(one)
    assert memory.admit(running(64, 1))
