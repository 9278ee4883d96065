"""Verifying drafts: the kernels, their twin and torch against the rule by the book in float64.

Whether that rule keeps the model's distribution is for `tests/engine/test_speculation.py`.
"""

import functools

import numpy as np
import pytest
import torch
from kernels.harness import assert_twin, compile_launches, start_locations, trace_launches
from kernels.rejection_steps import key_tensor, random_step

from minivllm.kernels import noise
from minivllm.kernels import rejection_sample as module
from minivllm.kernels.cpu.rejection_calls import torch_rejection
from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.kernels.rejection_sample import rejection_sample
from minivllm.platforms.triton_utils import tl, triton
from minivllm.worker.sample.gumbel import draft_keys, gumbel_max, row_keys

CHUNK = 64
"""Tokens per program in most tests, so that a few hundred are several chunks."""
VOCABULARIES = (1, CHUNK, 2 * CHUNK + 3)
RAGGED = (3, 0, 2, 1, 4, 1, 3, 2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", CHUNK)


def by_the_book(step):
    """Verify drafts request by request and draft by draft, in float64."""
    vocab, width = step.target_logits.shape[1], int(step.num_drafts.max()) + 1
    times = noise.waiting_times(step.keys, vocab).double()
    numbers = noise.decision_numbers(step.keys).double()
    out, row = torch.full((len(step.num_drafts), width), -1), 0
    for request, count in enumerate(step.num_drafts.tolist()):
        for place in range(count + 1):
            at, p = row + place, step.target_logits[row + place].double().softmax(-1)
            draft = int(step.draft_token_ids[at - request]) if place < count else -1
            if step.is_greedy[request]:
                token = int(p.argmax())
            elif step.draft_logits is not None and draft >= 0:
                q = step.draft_logits[at - request].double().softmax(-1)
                accepted = numbers[at] < p[draft] / q[draft]
                token = draft if accepted else int(((p - q).clamp(min=0) / times[at]).argmax())
            else:
                token = int((p / times[at]).argmax())
            out[request, place] = token
            if token != draft:
                break
        row += count + 1
    return out


@pytest.mark.parametrize("drawn", [False, True], ids=["point masses", "drawn"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_kernels_twin_and_torch_follow_the_rule(device, vocab, drawn):
    step = random_step(vocab, drawn, RAGGED)
    expected = by_the_book(step)
    kernels = rejection_sample(step.to(device), backend="triton")
    assert_twin(kernels, expected)
    assert_twin(kernels, rejection_sample(step, backend="cpu"))
    assert_twin(kernels, torch_rejection(step))
    lengths = (expected >= 0).sum(-1)
    assert (lengths > 1).any(), "nothing was accepted"
    assert (lengths <= step.num_drafts).any(), "nothing was rejected"


def test_probabilities_are_of_all_chunks_and_an_accepted_draft_stays(device):
    """Each request has one draft. Most of the target's mass is in the first chunk and the draft's
    is spread, so their sums differ.
    """
    vocab, requests = 2 * CHUNK + 3, 20
    step = random_step(vocab, True, num_drafts=(1,) * requests)
    step.is_greedy[:] = False
    generator = torch.Generator().manual_seed(0)
    target, theirs = (torch.randn(n, vocab, generator=generator) * 0.1 for n in (2 * requests, requests))
    target, theirs = target - 0.08 * torch.arange(vocab), theirs - 0.03 * torch.arange(vocab)
    drafts = gumbel_max(theirs, draft_keys(np.arange(requests), np.arange(requests))).int()
    step = step._replace(target_logits=target, draft_logits=theirs, draft_token_ids=drafts)
    kernels = rejection_sample(step.to(device), backend="triton")
    assert_twin(kernels, by_the_book(step))
    assert 5 <= (kernels[:, 1] >= 0).sum() <= 15


def test_chunks_of_the_size_in_use(device, monkeypatch):
    monkeypatch.undo()
    step = random_step(module.CHUNK + 5, True, num_drafts=(2, 1, 2))
    assert_twin(rejection_sample(step.to(device), backend="triton"), by_the_book(step))


EVERY_FORM = ["torch", "cpu", pytest.param("triton", marks=pytest.mark.interpreted)]


@pytest.fixture(params=EVERY_FORM)
def form(request):
    """Return `sample(step)` by torch, the compiled loops, or the kernels."""
    if request.param == "torch":
        return torch_rejection
    return functools.partial(rejection_sample, backend=request.param)


def test_no_drafts_and_no_requests(form):
    for drawn in (False, True):
        step = random_step(12, drawn, num_drafts=(0, 0, 0))
        assert form(step).tolist() == by_the_book(step).tolist()
        empty = RejectionArguments(*(tensor if tensor is None else tensor[:0] for tensor in step))
        assert form(empty).shape == (0, 1)


def test_a_draft_that_was_not_drawn_costs_no_exactness(form):
    """A draft of -1, or one that its logits exclude, gives the token drawn without drafts."""
    step = random_step(12, True, num_drafts=(1,) * 12)
    step.is_greedy[:] = False
    step.draft_token_ids[:6] = -1
    for draft in range(6, 12):
        step.draft_logits[draft, step.draft_token_ids[draft]] = -torch.inf
    plain = gumbel_max(step.target_logits, step.keys.numpy().view(np.uint32))
    assert form(step)[:, 0].tolist() == plain[::2].tolist()


def test_broken_logits_are_nobody_elses(form):
    """NaN and infinities in the target's or the draft's rows give a token of the vocabulary, and
    leave all others as before.
    """
    step = random_step(70, True, RAGGED)
    step.target_logits[1] = step.target_logits[4]
    before = form(step)
    firsts = start_locations([count + 1 for count in RAGGED]).tolist()
    for value in (torch.nan, torch.inf, -torch.inf):
        target, theirs = step.target_logits.clone(), step.draft_logits.clone()
        target[firsts[0]] = target[firsts[1]] = target[firsts[2], 5] = value
        theirs[firsts[4] - 4], theirs[firsts[6] - 6, 3] = value, value
        after = form(step._replace(target_logits=target, draft_logits=theirs))
        for request in range(len(RAGGED)):
            kept = after[request][: int((after[request] >= 0).sum())]
            assert len(kept) >= 1
            assert ((kept >= 0) & (kept < 70)).all()
            if request not in (0, 1, 2, 4, 6):
                assert torch.equal(after[request], before[request])


def test_p_equal_to_q_accepts_everything(form):
    step = random_step(70, True, RAGGED)
    is_draft = torch.cat([torch.arange(count + 1) < count for count in RAGGED])
    step.is_greedy[:] = False
    theirs = step.target_logits[is_draft]
    ids = gumbel_max(theirs, draft_keys(np.arange(len(theirs)), np.arange(len(theirs)))).int()
    kept = form(step._replace(draft_logits=theirs, draft_token_ids=ids))
    assert (kept >= 0).sum(-1).tolist() == [count + 1 for count in RAGGED]


def test_greedy_requests_keep_drafts_up_to_the_first_that_is_not_the_likeliest(form):
    likeliest = torch.tensor([4, 2, 7, 1, 0, 3, 3, 5, 6])
    logits = torch.nn.functional.one_hot(likeliest, 9).float()
    drafts = torch.tensor([4, 2, 1, 8, 3], dtype=torch.int32)
    counts = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    keys = key_tensor(row_keys(np.zeros(9), np.arange(9)))
    step = RejectionArguments(logits, drafts, counts, None, torch.ones(4, dtype=torch.bool), keys)
    assert form(step).tolist() == [[4, 2, 7], [1, -1, -1], [0, -1, -1], [3, -1, -1]]
    tied = step._replace(target_logits=torch.zeros(9, 70), draft_token_ids=torch.zeros_like(drafts))
    assert form(tied).tolist() == [[0, 0, 0], [0, -1, -1], [0, 0, -1], [0, 0, 0]]


# ---- noise ---------------------------------------------------------------------------------------


@triton.jit
def noise_kernel(bits, numbers, times, decisions, keys, VOCAB: tl.constexpr):
    """Grid (rows,)."""
    row, token = tl.program_id(0), tl.arange(0, VOCAB)
    first, second = tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
    at = row * VOCAB + token
    tl.store(bits + at, noise.hashed_bits(token, first, second).to(tl.int32, bitcast=True))
    tl.store(numbers + at, noise.uniform_number(token, first, second))
    tl.store(times + at, noise.waiting_time(token, first, second))
    tl.store(decisions + row, noise.decision_number(first, second))


def test_the_noise_is_the_same_bit_for_bit(device):
    rows, vocab = 16, 4096
    keys = key_tensor(row_keys(np.arange(rows) ** 7, np.arange(rows)))
    bits = torch.empty(rows, vocab, dtype=torch.int32, device=device)
    numbers, times, decisions = (torch.empty(shape, device=device) for shape in ((rows, vocab), (rows, vocab), rows))
    noise_kernel[(rows,)](bits, numbers, times, decisions, keys.to(device), VOCAB=vocab)
    hashed = noise.hashed(keys, torch.arange(vocab, dtype=torch.int32))
    exact = (hashed.double() % 2**32).float()
    assert_twin(bits, hashed)
    assert_twin(numbers, (exact + 0.5) * 2.0**-32, scale=0)
    assert_twin(noise.uniform_numbers(hashed), numbers.cpu(), scale=0)
    assert_twin(decisions, noise.decision_numbers(keys), scale=0)
    book = -torch.log1p(-numbers.cpu().double())
    for result in (times.cpu(), noise.waiting_times(keys, vocab)):
        assert (result.double() / book - 1).abs().max() < 5e-7, "small waiting times win: they need all their digits"


def test_the_twins_noise_is_the_same_bit_for_bit():
    loops = pytest.importorskip("minivllm.kernels.cpu.gumbel_loops", reason="a GPU's image has no numba")
    # Only compiled functions can call the loops' parts.
    numba = pytest.importorskip("numba")
    mixed = numba.njit(lambda token, first, second: loops.mixed(token, first, second))
    uniform = numba.njit(lambda bits: loops.uniform(bits))
    keys = row_keys(np.arange(4) ** 7, np.arange(4))
    hashed = noise.hashed(key_tensor(keys), torch.arange(500, dtype=torch.int32))
    numbers = noise.uniform_numbers(hashed).numpy()
    for row, token in np.ndindex(4, 500):
        bits = mixed(np.uint32(token), *keys[row])
        assert bits == np.uint32(hashed[row, token].item() % 2**32)
        assert uniform(np.uint32(bits)) * np.float32(2.0**-32) == numbers[row, token]


# ---- compiled, traced -------------------------------------------------------------------


def test_compiled_for_every_target(monkeypatch):
    monkeypatch.undo()  # chunks of the size in use
    compile_launches(monkeypatch, module, "reduce_rows_kernel", "recover_kernel", load_bytes=16)
    compile_launches(monkeypatch, module, "walk_drafts_kernel", "replace_kernel")
    with torch.device("meta"):
        logits, ids = torch.empty(320, 128256), torch.empty(256, dtype=torch.int32)
        greedy, keys = torch.empty(64, dtype=torch.bool), torch.empty(320, 2, dtype=torch.int32)
        arguments = RejectionArguments(logits, ids, ids[:64], logits[:256], greedy, keys)
        module.launch(torch.empty(64, 6, dtype=torch.int64), arguments, ids[:65])


@pytest.mark.interpreted
def test_logits_are_read_once_and_no_program_meets_another(monkeypatch):
    """All logits are read once, and then the rows of the requests with a rejected draft."""
    names = ("reduce_rows_kernel", "walk_drafts_kernel", "recover_kernel", "replace_kernel")
    traces = trace_launches(monkeypatch, module, *names)
    vocab = 2 * CHUNK + 3
    step = random_step(vocab, True, RAGGED)
    assert_twin(rejection_sample(step, backend="triton"), by_the_book(step))
    assert traces.keys() == {*names}
    greedy_drafts = int((step.num_drafts * step.is_greedy).sum())
    drawn = (step.draft_token_ids >= 0).sum()
    rows, drafts = len(step.target_logits), len(step.draft_token_ids)
    reduced = traces["reduce_rows_kernel"].arguments
    assert reduced["target_logits"].bytes_read == rows * vocab * 4
    assert reduced["draft_logits"].bytes_read == reduced["draft_logits"].bytes_read_once <= drawn * vocab * 4
    assert reduced["draft_logits"].bytes_read >= (drafts - greedy_drafts - (step.draft_token_ids < 0).sum()) * vocab * 4
    recovered = traces["recover_kernel"].arguments
    kept = (rejection_sample(step, backend="cpu") >= 0).sum(-1)
    at_most = int(((kept <= step.num_drafts) & ~step.is_greedy).sum()) * vocab * 4
    assert 0 < recovered["target_logits"].bytes_read == recovered["draft_logits"].bytes_read <= at_most
