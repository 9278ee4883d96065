"""A helpful error for a step that runs out of memory."""

from __future__ import annotations

from minivllm.errors import MinivllmError

SIGNS = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
ADVICE = "lower max_num_batched_tokens or max_num_seqs, or leave more free with a lower gpu_memory_utilization"


def explain_out_of_memory(error: BaseException) -> MinivllmError | None:
    """Turn an out-of-memory error, torch's (CPU or GPU) or Python's, into one that says which
    settings to lower.

    Return None for any other error, which the caller should raise unchanged.
    """
    # On a CPU this error has no type of its own, so its message has to do.
    text = str(error).lower()
    # torch.OutOfMemoryError is a RuntimeError, too.
    says_so = isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS)
    if not says_so and not isinstance(error, MemoryError):
        return None
    lines = str(error).strip().splitlines()
    return MinivllmError(f"a step ran out of memory ({lines[0] if lines else type(error).__name__}): {ADVICE}")
