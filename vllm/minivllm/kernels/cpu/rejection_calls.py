"""`rejection_sample` on a CPU: compiled loops (`rejection_loops.py`) if numba is installed, else torch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from minivllm.kernels.cpu.cells import RejectionCells
from minivllm.kernels.noise import decision_numbers, waiting_times
from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.platforms.threads import has_numba, run_programs


def reject_cpu(arguments: RejectionArguments) -> torch.Tensor:
    """As `rejection_sample`, with arguments that have passed its checks."""
    reject = numba_rejection if has_numba() else torch_rejection
    return reject(arguments)


def numba_rejection(arguments: RejectionArguments) -> torch.Tensor:
    """The compiled loops: a thread walks a request's drafts, and stops at the first rejection."""
    target_logits, draft_token_ids, num_drafts, draft_logits, is_greedy, keys = arguments
    counts = num_drafts.numpy().astype(np.int64)
    starts = np.append(0, (counts + 1).cumsum())
    target, drafts = target_logits.contiguous(), draft_token_ids.long().contiguous()
    likeliest = target.numpy().argmax(-1)  # numpy's is ten times as fast as torch's
    theirs = target.new_empty(0, 0) if draft_logits is None else draft_logits.contiguous()
    largest = theirs.numpy().max(-1) if theirs.numel() else np.empty(0, np.float32)
    greedy, keys = is_greedy.to(torch.uint8).contiguous(), keys.contiguous()
    out = torch.empty(len(counts), int(counts.max(initial=0)) + 1, dtype=torch.int64)
    cells = RejectionCells(
        requests=len(counts),
        rows=len(target),
        vocab=target.shape[1],
        width=out.shape[1],
        out=out.data_ptr(),
        target_logits=target.data_ptr(),
        draft_logits=theirs.data_ptr() if theirs.numel() else 0,
        draft_token_ids=drafts.data_ptr(),
        starts=starts.ctypes.data,
        likeliest=likeliest.ctypes.data,
        largest_of_draft=largest.ctypes.data,
        is_greedy=greedy.data_ptr(),
        keys=keys.data_ptr(),
    )
    run_programs(_programs(), cells, most_threads=len(counts))
    return out


def torch_rejection(arguments: RejectionArguments) -> torch.Tensor:
    """As `rejection_sample`, with torch operations: decides on all drafts, also on those after the first rejection."""
    target_logits, draft_token_ids, num_drafts, draft_logits, is_greedy, keys = arguments
    rows, device = len(target_logits), target_logits.device
    num_drafts, keys = num_drafts.to(device).long(), keys.to(device)
    width = num_drafts + 1
    request = torch.repeat_interleave(torch.arange(len(width), device=device), width, output_size=rows)  # of each row
    place = torch.arange(rows, device=device) - (width.cumsum(0) - width)[request]  # of each row in its request
    drafts = torch.full((rows,), -1, dtype=torch.int64, device=device)
    drafts[place < num_drafts[request]] = draft_token_ids.to(device).long()

    target_logits = _below_infinity(target_logits)
    times = waiting_times(keys, target_logits.shape[1])
    greedy = is_greedy.to(device)[request]
    tokens = (target_logits - times.log()).argmax(-1)
    tokens[greedy] = target_logits[greedy].argmax(-1)
    accepted = tokens == drafts
    if draft_logits is not None:
        drawn = ((drafts >= 0) & ~greedy).nonzero().squeeze(-1)
        theirs, ids = draft_logits[drawn - request[drawn]], drafts[drawn]
        numbers = decision_numbers(keys[drawn])
        accepted[drawn], recovered = _decide(target_logits[drawn], theirs, ids, times[drawn], numbers)
        tokens[drawn] = torch.where(recovered >= 0, recovered, tokens[drawn])

    table = torch.zeros(len(width), int(width.max()) if len(width) else 1, dtype=torch.int64, device=device)
    table[request, place] = accepted.long()
    num_accepted = table.cumprod(-1).sum(-1)[request]
    kept = place <= num_accepted
    out = torch.full_like(table, -1)
    out[request[kept], place[kept]] = torch.where(place < num_accepted, drafts, tokens)[kept]
    return out


def _decide(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    ids: torch.Tensor,
    times: torch.Tensor,
    numbers: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of drafts `ids` [n] that were drawn: which are accepted, and what replaces each (-1: nothing is left over)."""
    p, q = (_below_infinity(one).softmax(-1).nan_to_num(0.0) for one in (target_logits, draft_logits))
    p_of_draft, q_of_draft = (one.gather(-1, ids.unsqueeze(-1)).squeeze(-1) for one in (p, q))
    possible = q_of_draft > 0  # else it was not drawn from these logits
    scores = (p - q).clamp(min=0.0) / times
    best, recovered = scores.max(-1)
    return possible & (numbers < p_of_draft / q_of_draft), torch.where(possible & (best > 0), recovered, -1)


def _below_infinity(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~(logits < torch.inf), -torch.inf)


@functools.cache
def _programs() -> Any:
    """Imports numba only when needed, since that takes a second."""
    from minivllm.kernels.cpu import rejection_loops

    return rejection_loops.programs()
