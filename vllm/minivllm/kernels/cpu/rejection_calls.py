"""`rejection_sample` on a CPU: compiled loops (`rejection_loops.py`) if numba is installed, else
torch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.kernels.cpu.cells import RejectionCells
from minivllm.kernels.cpu.loops import loops
from minivllm.kernels.noise import decision_numbers, waiting_times
from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.platforms.threads import has_numba, run_programs


def reject_cpu(arguments: RejectionArguments) -> Tensor:
    """Implement `rejection_sample`, which has checked the arguments."""
    return numba_rejection(arguments) if has_numba() else torch_rejection(arguments)


def numba_rejection(arguments: RejectionArguments) -> Tensor:
    """Run the compiled loops: a thread walks a request's drafts, and stops at the first
    rejection.
    """
    target_logits, draft_token_ids, num_drafts, draft_logits, is_greedy, keys = arguments
    counts = num_drafts.numpy().astype(np.int64)
    starts = np.append(0, (counts + 1).cumsum())
    target = target_logits.contiguous()
    drafts = draft_token_ids.long().contiguous()
    likeliest = target.numpy().argmax(-1)  # numpy's is ten times as fast as torch's
    drawn_from = target.new_empty(0, 0) if draft_logits is None else draft_logits.contiguous()
    largest = drawn_from.numpy().max(-1) if drawn_from.numel() else np.empty(0, np.float32)
    greedy = is_greedy.to(torch.uint8).contiguous()
    keys = keys.contiguous()
    out = torch.empty(len(counts), int(counts.max(initial=0)) + 1, dtype=torch.int64)
    cells = RejectionCells(
        requests=len(counts),
        rows=len(target),
        vocab=target.shape[1],
        width=out.shape[1],
        out=out.data_ptr(),
        target_logits=target.data_ptr(),
        draft_logits=drawn_from.data_ptr() if drawn_from.numel() else 0,
        draft_token_ids=drafts.data_ptr(),
        starts=starts.ctypes.data,
        likeliest=likeliest.ctypes.data,
        largest_of_draft=largest.ctypes.data,
        is_greedy=greedy.data_ptr(),
        keys=keys.data_ptr(),
    )
    run_programs(loops("rejection_loops").programs_for(), cells, most_threads=len(counts))
    return out


def torch_rejection(arguments: RejectionArguments) -> Tensor:
    """Implement `rejection_sample` with torch: decide on all drafts, also on those after the
    first rejection.
    """
    target_logits, draft_token_ids, num_drafts, draft_logits, is_greedy, keys = arguments
    rows = len(target_logits)
    device = target_logits.device
    num_drafts = num_drafts.to(device).long()
    keys = keys.to(device)
    width = num_drafts + 1  # [requests], the rows of each
    # Of each row: its request.
    request = torch.repeat_interleave(torch.arange(len(width), device=device), width, output_size=rows)
    # Of each row: its place in the request.
    place = torch.arange(rows, device=device) - (width.cumsum(0) - width)[request]
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
        drawn_from = draft_logits[drawn - request[drawn]]
        numbers = decision_numbers(keys[drawn])
        decided = _decide(target_logits[drawn], drawn_from, drafts[drawn], times[drawn], numbers)
        accepted[drawn], recovered = decided
        tokens[drawn] = torch.where(recovered >= 0, recovered, tokens[drawn])

    table = torch.zeros(len(width), int(width.max()) if len(width) else 1, dtype=torch.int64, device=device)
    table[request, place] = accepted.long()
    num_accepted = table.cumprod(-1).sum(-1)[request]  # [rows], of each row's request
    kept = place <= num_accepted
    out = torch.full_like(table, -1)
    out[request[kept], place[kept]] = torch.where(place < num_accepted, drafts, tokens)[kept]
    return out


def _decide(
    target_logits: Tensor, draft_logits: Tensor, ids: Tensor, times: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which of the drawn drafts `ids` [n] are accepted, and what replaces each (-1: p and
    q are equal).
    """
    p, q = (_below_infinity(logits).softmax(-1).nan_to_num(0.0) for logits in (target_logits, draft_logits))
    p_of_draft, q_of_draft = (probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1) for probs in (p, q))
    possible = q_of_draft > 0  # else it was not drawn from these logits
    scores = (p - q).clamp(min=0.0) / times
    best, recovered = scores.max(-1)
    return possible & (numbers < p_of_draft / q_of_draft), torch.where(possible & (best > 0), recovered, -1)


def _below_infinity(logits: Tensor) -> Tensor:
    return logits.masked_fill(~(logits < torch.inf), -torch.inf)
