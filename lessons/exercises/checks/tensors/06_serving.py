"""Check the part of exercise 06 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

import torch

from minivllm.config import Parts
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.engines.over_http import serve_load, Client
from minivllm_lab.checks.plugged import Plugged, Served


# ---- the kernel, in steps --------------------------------------------------------------------------------------------


def masks(rows, vocab_size, seed=0):
    """Make random logits, the allowed tokens, and those as words whose bits beyond the vocabulary are random."""
    draw = torch.Generator().manual_seed(seed)
    words = -(-vocab_size // 32)
    bits = torch.rand(rows, words * 32, generator=draw) < 0.4
    bits[:, 31::32] |= torch.rand(rows, words, generator=draw) < 0.5
    values = (bits.view(rows, words, 32).long() << torch.arange(32)).sum(-1)
    bitmask = torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)
    return torch.randn(rows, vocab_size, generator=draw), bits[:, :vocab_size], bitmask


def traced(kernel, grid, *arguments, **constants):
    """Trace the kernel; it must stay inside its arguments and have no races."""
    trace = trace_kernel(kernel, grid, *arguments, **constants)
    assert not trace.out_of_bounds, f"{trace.out_of_bounds[0]}. Is a token or a word not masked that is not there?"
    assert not trace.races, f"{trace.races[0]}. Does a row end before its last word does?"
    return trace


def assert_masked(logits, before, allowed):
    """Check that forbidden tokens have -inf, and all others what they had."""
    expected = before.masked_fill(~allowed, -torch.inf)
    if torch.equal(logits, expected):
        return
    row, token = (logits != expected).nonzero()[0].tolist()
    hint = ""
    if torch.equal(logits, before.masked_fill(allowed, -torch.inf)):
        hint = ". It is the other way round: 1 means allowed"
    elif token % 32 == 31:
        hint = ". Bit 31 makes the word negative: `word & (1 << 31) > 0` is never true"
    elif torch.isnan(logits).any():
        hint = ". 0 * -inf is nan: store -inf, do not multiply"
    elif len(logits) > 1 and torch.equal(logits[row], before[row]):
        hint = ". Nothing of this row was written: which of the two program ids is the row?"
    what = f"row {row}, token {token}: {logits[row, token]:.2f}, and {expected[row, token]:.2f} is right"
    raise AssertionError(f"{what}{hint}")


def assert_traffic(trace, words, forbidden):
    """Check that each word is read once, no logit is read, and only those of forbidden tokens are written."""
    read, logits = trace.arguments["bitmask"].bytes_read, trace.arguments["logits"]
    assert read == 4 * words, f"{read:,} bytes of the bitmask read, and {4 * words:,} are enough: each word once"
    assert not logits.bytes_read, f"{logits.bytes_read:,} bytes of logits read: none are needed to write -inf"
    written = logits.bytes_written
    assert written == 4 * forbidden, f"{written:,} bytes of logits written; the forbidden tokens have {4 * forbidden:,}"


def check_kernel_step_1_words(module):
    """Stretch: a program takes one word and sets the logits to -inf where its bits are 0."""
    before, allowed, bitmask = masks(1, 160)
    logits = before[0].clone()
    trace = traced(module.mask_words_kernel, (5,), logits, bitmask[0].contiguous())
    assert_masked(logits[None], before, allowed)
    assert_traffic(trace, 5, int((~allowed).sum()))


def check_kernel_step_2_rows(module):
    """Stretch: it masks many rows, whose last word is not full."""
    for vocab_size in (70, 64, 5):
        before, allowed, bitmask = masks(3, vocab_size, seed=vocab_size)
        logits = before.clone()
        trace = traced(module.mask_rows_kernel, bitmask.shape, logits, bitmask, vocab_size)
        assert_masked(logits, before, allowed)
        assert_traffic(trace, bitmask.numel(), int((~allowed).sum()))


def check_kernel_step_3_batch(module):
    """Stretch: rows without a grammar are neither read nor written; the others, several words a program."""
    for vocab_size, block in ((300, 4), (256, 8), (33, 4)):
        before, allowed, bitmask = masks(5, vocab_size, seed=vocab_size)
        has_grammar = torch.tensor([1, 0, 7, 0, -1], dtype=torch.int32)
        logits, words = before.clone(), bitmask.shape[1]
        grid = (5, -(-words // block))
        trace = traced(
            module.apply_grammar_bitmask_kernel, grid, logits, bitmask, has_grammar, vocab_size, words, BLOCK=block
        )
        free = has_grammar == 0
        for row in (2, 4):
            left = torch.equal(logits[row], before[row])
            assert not left, f"has_grammar of row {row} is {has_grammar[row]}, which is not 0, and nothing was written"
        touched = not torch.equal(logits[free], before[free])
        assert not touched, "a row without a grammar was written: its words mean nothing"
        assert_masked(logits, before, allowed | free[:, None])
        read = trace.arguments["bitmask"].bytes_read
        assert read != 4 * bitmask.numel(), f"{read:,} bytes of the bitmask read: also those of rows without a grammar"
        assert_traffic(trace, 3 * words, int((~allowed[~free]).sum()))


# ---- the server with the learner's parts -----------------------------------------------------------------------------

ADD = "def add(a, b):\n    return"
CLIENTS = (
    Client(prompt=ADD),
    Client(prompt="import os\n", stream=False),
    Client(prompt=ADD, stop=("b\n\ndef _", "}")),
    Client(prompt="for i in range(10):\n    print(", stop=("\n\n\n",)),
    Client(prompt="class Stack:\n", max_tokens=200, reads_late=True),
    Client(prompt="for i in range(3):\n", max_tokens=220, leaves_after=3),
    Client(prompt="x", max_tokens=230, stream=False, leaves_after=0),
)


def plug(module) -> Plugged:
    """Run a server with the learner's three parts, on real sockets."""
    parts = Parts(
        output_collector=module.RequestOutputCollector,
        stop_strings=module.StopStrings,
        until_disconnected=module.until_disconnected,
    )
    return Plugged(parts=parts, serve=serve_clients)


def serve_clients(_plugged, parts) -> Served:
    """Serve all clients at once; return what those who stayed got, and what the engine did for those who left."""
    load = serve_load(CLIENTS, parts)
    stayed = [
        (client, answer) for client, answer in zip(CLIENTS, load.answers, strict=True) if client.leaves_after is None
    ]
    served = Served([answer.token_ids for _, answer in stayed], [answer.text for _, answer in stayed])
    (late,) = (answer for client, answer in stayed if client.reads_late)
    stopped = sum(answer.finish_reason == "stop" for _, answer in stayed)
    served.rows = {"events for the 200 tokens of the client that reads late": late.num_events}
    served.equal = {
        "clients served to the end": len(stayed),
        "ended by a stop string of several tokens": stopped,
        "clients that left, and their requests aborted": load.num_aborted,
        "blocks free again at the end": f"{load.num_free_blocks} of {load.num_blocks}",
    }
    return served
