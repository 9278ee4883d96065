"""Check the part of exercise 01 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

import math
from functools import partial

import torch

from minivllm.config import EMBEDDED_MODEL, ModelConfig, Parts
from minivllm.memory import kv_bytes_per_token
from minivllm.models.attention import CausalAttention
from minivllm.models.loader import load_model
from minivllm.platforms.triton_utils import triton
from minivllm_lab.engines.inside import runner_of
from minivllm_lab.checks.kernel_trace import trace_kernel, LOAD
from minivllm_lab.checks.plugged import PROMPTS, Plugged


# ---- one step on a cache ---------------------------------------------------------------------------------------------


def _case(heads, kv_heads, head_dim, length, slots, seed=0, scale=1.0):
    """Make the arguments of `decode_step`: a cache whose free slots hold garbage, and a new token."""
    draw = torch.Generator().manual_seed(seed)
    q = scale * torch.randn(heads, head_dim, generator=draw)
    k, v = torch.randn(2, kv_heads, head_dim, generator=draw)
    keys, values = torch.full((2, slots, kv_heads, head_dim), math.inf)
    keys[:length] = torch.randn(length, kv_heads, head_dim, generator=draw)
    values[:length] = torch.randn(length, kv_heads, head_dim, generator=draw)
    return q, k, v, keys, values, length


def _attend(q, k, v, keys, values, length, *, scale=None, neighbours=True, over=0, itself=True):
    """Compute the expected result of the step in float64; the options make the usual mistakes."""
    heads, kv_heads, head_dim = len(q), len(k), q.shape[1]
    seen_keys, seen_values = (
        torch.cat([old[:length], new[None]][: 1 + itself]).double() for old, new in ((keys, k), (values, v))
    )
    kv_head = [head // (heads // kv_heads) if neighbours else head % kv_heads for head in range(heads)]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    scores = torch.einsum("hd,shd->sh", q.double(), seen_keys[:, kv_head]) * scale
    return torch.einsum("sh,shd->hd", scores.softmax(over), seen_values[:, kv_head]).float()


def _usual_steps(head_dim):
    """List the usual mistakes: a sentence about each, and the options of `_attend` that make it."""
    return {
        "Divide the scores by sqrt(head_dim)": {"scale": 1.0},
        "Divide the scores by the square root of head_dim, not by head_dim": {"scale": 1 / head_dim},
        "The new token must see itself: read slots 0 to `length`, both included": {"itself": False},
        "Neighbouring query heads share a KV head: head h reads h // (heads // kv_heads)": {"neighbours": False},
        "The softmax runs over the slots, not over the heads": {"over": 1},
    }


def _mistake_in(found, arguments):
    """Return the usual mistake that gives this result, as a sentence; "" if none does."""
    for sentence, options in _usual_steps(arguments[0].shape[1]).items():
        if torch.allclose(found, _attend(*arguments, **options), atol=1e-4):
            return sentence
    return ""


def _copies(arguments):
    return [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]


def _agrees(module, arguments, hint=""):
    """Run `decode_step` on a copy of the arguments and check the result; else say in a sentence what is wrong,
    or give the hint.
    """
    (heads, head_dim), kv_heads, length = arguments[0].shape, len(arguments[1]), arguments[-1]
    found, expected = module.decode_step(*_copies(arguments)), _attend(*arguments)
    assert found is not None, "it returns nothing: is there a `return`?"
    found = torch.as_tensor(found).float()
    assert found.shape == expected.shape, f"the result has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    case = f"with {heads} heads on {kv_heads} KV heads of {head_dim} and {length} tokens cached"
    assert found.isfinite().all(), (
        f"inf or NaN {case}: was a slot read that holds no token, or the new token not written?"
    )
    error = (found - expected).abs().max().item()
    assert error < 1e-4, f"off by {error:.2g} {case}. {_mistake_in(found, arguments) or hint}"


def check_the_step_by_hand(module):
    """The lesson's example: (0.212, 0.576, 0.212, 0) for head 0, (0.245, 0.090, 0.665, 0) for head 1."""
    keys, values = torch.full((2, 4, 1, 4), math.inf)
    keys[:2, 0] = torch.tensor([[2.0, 0, 0, 0], [0, 2, 0, 0]])
    values[:2, 0] = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]])
    q, k, v = (
        torch.tensor([[0.0, 1, 0, 0], [1, 0, 2, 0]]),
        torch.tensor([[0.0, 0, 2, 0]]),
        torch.tensor([[0.0, 0, 1, 0]]),
    )
    _agrees(module, (q, k, v, keys, values, 2))


def check_first_token(module):
    """The first token sees only itself: the result is its own value."""
    _agrees(module, _case(4, 4, 8, 0, 3))


def check_new_token_sees_itself_and_no_further(module):
    """With 5 of 9 slots filled, the new token reads exactly 6: its own, but no garbage."""
    _agrees(module, _case(2, 2, 16, 5, 9))


def check_garbage_may_look_like_tokens(module):
    """Slots that an earlier request filled are not read: only `length` says which tokens are this request's."""
    arguments = _case(2, 2, 16, 5, 9)
    for cache in arguments[3:5]:
        cache[5:] = cache[:4]
    _agrees(module, arguments, "Was a slot beyond the new token's read, where an earlier request has left a token?")


def check_last_slot(module):
    """The last free slot can be filled."""
    _agrees(module, _case(2, 1, 16, 7, 8))


def check_groups_of_heads(module):
    """With 6 query heads on 2 KV heads, the first 3 read one and the last 3 the other."""
    _agrees(module, _case(6, 2, 80, 33, 64))


def check_a_long_cache(module):
    """Nothing is forgotten: with 300 tokens cached, the new one reads 301 slots."""
    _agrees(module, _case(4, 2, 16, 300, 310))


def check_large_scores(module):
    """Scores of several hundred work as well as small ones: the softmax does not overflow."""
    arguments = _case(4, 2, 16, 6, 8, scale=300.0)
    found = torch.as_tensor(module.decode_step(*_copies(arguments)))
    assert found.isfinite().all(), (
        "inf or NaN with scores of several hundred: exp(100) is more than float32 holds. Subtract the largest score "
        "before the exponential, or use torch.softmax"
    )
    _agrees(module, arguments)


def check_cache_is_written_in_place(module):
    """Slot `length` of the caller's keys and values is filled, and no other element is changed."""
    arguments = _case(4, 2, 8, 3, 6)
    before = _copies(arguments)
    module.decode_step(*arguments)
    for name, given, now in zip("qkv", before, arguments):
        assert torch.equal(given, now), f"{name} was changed; only `keys` and `values` may be"
    (_, k, v, *caches, length), (keys, values) = before, arguments[3:5]
    for name, cache, old, new in (("keys", keys, caches[0], k), ("values", values, caches[1], v)):
        wanted = old.clone()
        wanted[length] = new
        wrong = [slot for slot in range(len(cache)) if not torch.equal(cache[slot], wanted[slot])]
        untouched = torch.equal(cache, old)
        hint = "nothing was written into the caller's tensor: a copy, perhaps" if untouched else "it must be in place"
        assert not wrong, (
            f"slot {wrong[0]} of {name} is not what it should be ({hint}); the new token goes to slot {length}"
        )


def check_same_text_as_without_a_cache(module):
    """The embedded model writes the same 16 tokens with it as without a cache."""
    model, config = load_model(EMBEDDED_MODEL, dtype="float32")
    prompt = list(range(300, 310))
    cached = _generate_with_cache(model, config, prompt, 16, module.decode_step)
    text = list(prompt)
    for _ in range(16):
        hidden = model(torch.tensor(text), torch.arange(len(text)), CausalAttention(config))
        text.append(int(model.compute_logits(hidden[-1:]).argmax()))
    first = next((index for index, (one, other) in enumerate(zip(cached, text)) if one != other), None)
    assert first is None, f"token {first - len(prompt) + 1} of the new ones differs"


def _generate_with_cache(model, config, prompt, new_tokens, decode_step):
    """Generate greedily, feeding every token, those of the prompt too, through `decode_step` one at a time."""
    shape = (2, config.num_hidden_layers, len(prompt) + new_tokens, config.num_key_value_heads, config.head_dim)
    keys, values = torch.full(shape, math.nan)
    text = list(prompt)
    for position in range(len(prompt) + new_tokens - 1):

        def attend(layer, q, k, v, position=position):
            return torch.as_tensor(decode_step(q[0], k[0], v[0], keys[layer], values[layer], position))[None]

        hidden = model(torch.tensor(text[position : position + 1]), torch.tensor([position]), attend)
        if position >= len(prompt) - 1:
            text.append(int(model.compute_logits(hidden).argmax()))
    return text


# ---- the kernel, in three steps --------------------------------------------------------------------------------------


def _runs_clean(trace, hint):
    """Check that no program touches elements of another one, or memory outside the arguments."""
    assert not trace.races, f"a race: {trace.races[0]}. {hint}"
    assert not trace.out_of_bounds, f"{trace.out_of_bounds[0]}. {hint}"


def _holds(name, cache, wanted):
    """Check the cache; list the elements that are wrong, and what they are."""
    wrong = (cache != wanted).flatten().nonzero().flatten().tolist()
    if not wrong:
        return
    first, found, right = wrong[0], cache.flatten()[wrong[0]].item(), wanted.flatten()[wrong[0]].item()
    raise AssertionError(
        f"{len(wrong)} elements of {name} are wrong, the first is element {first}: {found:g}, and should be {right:g} "
        "(old elements are below 1000, new ones above)"
    )


def _moves(trace, read, written):
    """Check that exactly these bytes were moved."""
    for what, found, wanted in (("read", trace.bytes_read, read), ("written", trace.bytes_written, written)):
        assert found == wanted, f"{found} bytes are {what}, and {wanted} must be: move each number once, and no other"


def _each_writes_its_own(trace, name, own, what):
    """Check that program p wrote the elements `own[p]` (a range) of an argument, and no others."""
    for program, wanted in enumerate(own):
        writes = [a for a in trace.accesses if a.kind != LOAD and (a.argument, a.program) == (name, (program,))]
        found = sorted({int(element) for access in writes for element in access.elements})
        assert found == list(wanted), (
            f"program {program} writes {_elements(found)} of {name}, and its own are {_elements(list(wanted))}: "
            f"each program writes {what}, and not the others' too"
        )


def _elements(numbers):
    return f"{len(numbers)} elements from {numbers[0]} on" if numbers else "no element"


def _numbered(*shape, start=0):
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).view(shape)


def check_append_token(module):
    """Step 1: a token's 8 numbers are in slot 2 of 5, and nothing else has changed."""
    for slots, width, slot in ((5, 8, 2), (3, 4, 0), (4, 16, 3)):
        cache, new = _numbered(slots, width), _numbered(width, start=1000)
        wanted = cache.clone()
        wanted[slot] = new
        trace = trace_kernel(module.append_token, (1,), cache, new, slot, WIDTH=width)
        _runs_clean(trace, "Slot s begins at element s * WIDTH")
        _holds("the cache", cache, wanted)
        _moves(trace, new.nbytes, new.nbytes)


def check_append_heads(module):
    """Step 2: heads of 3, 5 or 80 numbers are written by a program each, and none writes into its neighbour."""
    for slots, kv_heads, head_dim, slot in ((4, 2, 3, 2), (3, 4, 5, 0), (3, 2, 80, 2), (2, 3, 8, 1)):
        cache, new = _numbered(slots, kv_heads, head_dim), _numbered(kv_heads, head_dim, start=1000)
        wanted = cache.clone()
        wanted[slot] = new
        sizes = {"HEAD_DIM": head_dim, "BLOCK": triton.next_power_of_2(head_dim)}
        trace = trace_kernel(module.append_heads, (kv_heads,), cache, new, slot, **sizes)
        _runs_clean(trace, "Only HEAD_DIM of the BLOCK places are this head's: mask the load and the store")
        _holds("the cache", cache, wanted)
        starts = [(slot * kv_heads + head) * head_dim for head in range(kv_heads)]
        _each_writes_its_own(trace, "cache", [range(first, first + head_dim) for first in starts], "one head")
        _moves(trace, new.nbytes, new.nbytes)


def _append_case(lengths, slots, width):
    """Make the kernel's arguments and the expected caches; a request whose slots are full writes nothing."""
    keys, values = _numbered(2, len(lengths), slots, width)
    k, v = _numbered(2, len(lengths), width, start=1000)
    wanted = keys.clone(), values.clone()
    for request, length in enumerate(lengths):
        if length < slots:
            wanted[0][request, length], wanted[1][request, length] = k[request], v[request]
    return (keys, values, k, v, torch.tensor(lengths, dtype=torch.int32), slots), wanted


def _append_step(module, lengths, slots, width):
    arguments, wanted = _append_case(lengths, slots, width)
    sizes = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}
    trace = trace_kernel(module.append_kernel, (len(lengths),), *arguments, **sizes)
    _runs_clean(trace, "A cache with `length` = `slots` is full, and lanes beyond WIDTH are the next slot's")
    starts = [(request * slots + length) * width for request, length in enumerate(lengths)]
    own = [range(first, first + width * (length < slots)) for first, length in zip(starts, lengths)]
    for name, cache, right in zip(("keys", "values"), arguments, wanted):
        _holds(name, cache, right)
        _each_writes_its_own(trace, name, own, "one request's token")
    moved = 4 * 2 * width * sum(length < slots for length in lengths)
    _moves(trace, moved + 4 * len(lengths), moved)


def check_append_kernel(module):
    """Stretch: step 3: each of three requests gets its key and value at its own length."""
    _append_step(module, [2, 0, 3], slots=4, width=8)


def check_append_kernel_any_width(module):
    """Stretch: step 3: it works for tokens of 6 or 160 numbers, and moves no number more than once."""
    _append_step(module, [1, 4, 2], slots=5, width=6)
    _append_step(module, [0, 1], slots=2, width=160)


def check_append_kernel_full_cache(module):
    """Stretch: step 3: a request whose cache is full writes nothing, least of all into its neighbour's first slot."""
    _append_step(module, [4, 1, 4], slots=4, width=8)
    _append_step(module, [3, 0], slots=3, width=6)


# ---- in the engine ---------------------------------------------------------------------------------------------------

SLOTS = 64
"""Slots of a request, and of a block: so each request's cache is one contiguous block."""
MEMORY = 4 * 64 * 2048
"""Bytes of KV cache to divide up: four requests of the embedded model in float32."""


class _Contiguous:
    """Serves as the engine's attention by `decode_step`: token by token, each request in its only block."""

    def __init__(self, decode_step, kv_caches, scale, sliding_window=None):
        self.decode_step, self.kv_caches = decode_step, kv_caches

    def of_step(self, metadata):
        return partial(self.attend, metadata)

    def attend(self, metadata, layer, q, k, v):
        cache, out = self.kv_caches[layer], torch.empty_like(q)
        starts = metadata.query_start_loc.tolist()
        for request, seq_len in enumerate(metadata.seq_lens.tolist()[: len(starts) - 1]):
            block = int(metadata.block_table[request, 0])
            for row in range(starts[request], starts[request + 1]):
                position = seq_len - (starts[request + 1] - row)
                step = q[row], k[row], v[row], cache.keys[block], cache.values[block], position
                out[row] = torch.as_tensor(self.decode_step(*step))
        return out


def plug(module) -> Plugged:
    """Use `decode_step` as the engine's attention, and `kv_bytes_per_token` to count the requests in half a MiB."""
    config = ModelConfig.from_pretrained(EMBEDDED_MODEL)
    yours, ours = module.kv_bytes_per_token(config, 4), kv_bytes_per_token(config, "float32")

    def fits(bytes_per_token):
        return {"num_gpu_blocks_override": 1 + MEMORY // (SLOTS * bytes_per_token)}  # block 0 holds nobody's tokens

    def says(llm):
        caches = runner_of(llm).attention.kv_caches
        allocated = sum(cache.keys[1:].nbytes + cache.values[1:].nbytes for cache in caches)
        slots = (len(caches[0].keys) - 1) * SLOTS
        return {"slots": slots, "bytes, counted": f"{slots * yours:,}", "bytes, allocated": f"{allocated:,}"}

    return Plugged(
        parts=Parts(attention=partial(_Contiguous, module.decode_step)),
        engine_args={"block_size": SLOTS, "max_model_len": SLOTS, **fits(yours)},
        ours=fits(ours),
        prompts=[*PROMPTS, "while True:\n", "class Queue:"],
        says=says,
    )
