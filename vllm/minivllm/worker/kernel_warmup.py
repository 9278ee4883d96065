"""The steps that a worker runs before the first request, so that no request waits for a compiler.

On a CPU numba's loops are read from its cache, by one short step. On a GPU Triton compiles a kernel the first time that
it runs in some form, for a second and more, and the fastest of some configurations is found by trying them. CUDA graphs
do both for decode steps when they are captured. The other steps run one at a time, with prompts of so many tokens that
every form is met: all powers of two up to the largest step, and behind a long context, where splits share the keys;
and with as many drafts.

They write into the null block, which nobody reads. Only the long contexts lie all over the cache, of which nobody has
anything yet, since what is fastest from a cache line that is read again and again need not be so otherwise.

In vLLM v0.33.0: `vllm/model_executor/warmup/kernel_warmup.py`.
"""

from collections.abc import Generator, Iterator

from minivllm.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams

BEHIND_A_CONTEXT = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the steps with a long context: attention has its kernels for few tokens, some, and many."""


def warm_up_steps(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    num_drafts: int = 0,
    num_blocks: int = 1,
) -> Iterator[SchedulerOutput]:
    """The steps of a GPU with a cache of `num_blocks`, which verify up to `num_drafts` drafts of a request."""
    longest = max_model_len - 1
    finished: set[str] = set()
    most = min(max_num_batched_tokens, longest * max_num_seqs)
    for tokens in [*(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most]:
        step = _of_new_requests([(prompt, 0) for prompt in _divided(tokens, longest)], block_size, finished)
        yield step
        finished = set(step.num_scheduled_tokens)
    for tokens in BEHIND_A_CONTEXT:
        if tokens < min(longest, max_num_batched_tokens):
            step = _of_new_requests([(tokens, longest - tokens)], block_size, finished, num_blocks=num_blocks)
            yield step
            finished = set(step.num_scheduled_tokens)
    most_drafts = max(0, min(num_drafts, longest - 3, max_num_batched_tokens - 2))
    for drafts in (1 << bit for bit in range(most_drafts.bit_length())):
        finished = yield from _verified(drafts, block_size, finished)
    yield _nothing_but(finished)


def short_step(block_size: int) -> Iterator[SchedulerOutput]:
    """The step of a CPU: a prompt of two tokens."""
    step = _of_new_requests([(2, 0)], block_size, set())
    yield step
    yield _nothing_but(set(step.num_scheduled_tokens))


def _divided(tokens: int, longest: int) -> list[int]:
    """The fewest prompts of at most `longest` tokens that are so many together."""
    count = -(-tokens // longest)
    return [tokens // count + (place < tokens % count) for place in range(count)]


def _of_new_requests(
    prompts: list[tuple[int, int]], block_size: int, finished: set[str], room: int = 1, num_blocks: int = 1
) -> SchedulerOutput:
    """A step of new requests, each given as (tokens to compute, tokens computed before), with room for `room` more.

    Their blocks are the first `num_blocks`, in turn.
    """
    requests, counts = [], {}
    for place, (tokens, computed) in enumerate(prompts):
        name, known = f"warm-up {tokens} behind {computed}, {place}", tokens + computed
        params = SamplingParams(temperature=float(place % 2 == 0), seed=0)
        blocks = [block % num_blocks for block in range(-(-(known + room) // block_size))]
        requests.append(NewRequestData(name, [0] * known, [0] * known, blocks, computed, params))
        counts[name] = tokens
    return SchedulerOutput(requests, CachedRequestData(), counts, sum(counts.values()), {}, set(), finished)


def _verified(num_drafts: int, block_size: int, finished: set[str]) -> Generator[SchedulerOutput, None, set[str]]:
    """Two steps of a request, of which it returns the name: a prompt, and the verification of drafts."""
    prompt = _of_new_requests([(2, 0)], block_size, finished, 1 + num_drafts)
    yield prompt
    (name,) = prompt.num_scheduled_tokens
    known, count = CachedRequestData([name], [None], [2], [[]]), 1 + num_drafts
    yield SchedulerOutput([], known, {name: count}, count, {name: [0] * num_drafts}, set(), set())
    return {name}


def _nothing_but(finished: set[str]) -> SchedulerOutput:
    return SchedulerOutput([], CachedRequestData(), {}, 0, {}, set(), finished)
