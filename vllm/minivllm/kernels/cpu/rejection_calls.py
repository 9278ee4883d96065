"""`rejection_sample` on a CPU."""

from __future__ import annotations

import torch

from minivllm.kernels.noise import decision_numbers, waiting_times


def reject_cpu(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    is_greedy: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """As `rejection_sample`, with arguments that have passed its checks."""
    return torch_rejection(target_logits, draft_token_ids, num_drafts, draft_logits, is_greedy, keys)


def torch_rejection(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    is_greedy: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """As `rejection_sample`, with torch operations: decides on all drafts, also on those after the first rejection."""
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
