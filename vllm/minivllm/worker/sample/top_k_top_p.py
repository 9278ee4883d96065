"""Masks for unlikely tokens: min-p, top-k and top-p. In vLLM v0.33.0:
`vllm/v1/sample/ops/topk_topp_sampler.py`.
"""

import torch

# Number of most likely tokens of a row to sort at first; it grows eightfold until it is enough.
FIRST_LOOK = 64


def mask_below_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Mask, in place, the tokens that are less than `min_p` times as likely as the row's most
    likely one.

    logits [rows, vocab], float32, after temperature; min_p [rows], 0 for off.
    """
    # In logits: log of min_p × the largest probability.
    least = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)
    logits.masked_fill_(logits < least, -torch.inf)


def mask_beyond_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Mask, in place, all but the `top_k` most likely tokens and, among those, the most likely that
    make up `top_p`.

    The token that takes the mass to `top_p` or above is kept, and so is any token tied with the
    last one kept.

    logits [rows, vocab], float32; top_k [rows], int64, 0 for off; top_p [rows], float32, 1 for off.
    """
    vocab = logits.shape[-1]
    top_k = top_k.masked_fill(top_k == 0, vocab).clamp(max=vocab)
    needed_k = int(top_k.masked_fill(top_k == vocab, 1).max())  # of the rows that limit k at all
    num_looked_at = max(FIRST_LOOK, needed_k)
    while True:
        num_looked_at = min(num_looked_at, vocab)
        ordered = logits.topk(num_looked_at, dim=-1).values
        num_kept, enough = _num_kept(logits, ordered, top_k, top_p)
        if num_looked_at == vocab or bool(enough.all()):
            break
        num_looked_at *= 8
    # A row that keeps everything may not have been fully sorted.
    last_kept = (num_kept - 1).clamp(max=num_looked_at - 1)
    least = ordered.gather(-1, last_kept.unsqueeze(-1))
    least.masked_fill_((num_kept == vocab).unsqueeze(-1), -torch.inf)
    logits.masked_fill_(logits < least, -torch.inf)


def _num_kept(
    logits: torch.Tensor, ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tokens each row keeps, and whether `ordered`, its top tokens, was enough
    to tell; both [rows].
    """
    num_looked_at = ordered.shape[-1]
    weights = (ordered - ordered[:, :1]).exp()  # relative to the most likely token
    places = torch.arange(num_looked_at, device=logits.device)
    weights.masked_fill_(places >= top_k.unsqueeze(-1), 0.0)
    mass = weights.cumsum(dim=-1)
    cut_by_k = top_k <= num_looked_at
    # The mass of the whole row, in the same units.
    everything = (logits.logsumexp(dim=-1) - ordered[:, 0]).exp()
    needed = torch.where(cut_by_k, mass[:, -1], everything) * top_p
    mass_before = mass - weights  # a token is kept if those before it do not reach top_p
    num_kept = (mass_before < needed.unsqueeze(-1)).sum(dim=-1).clamp(min=1)
    off = top_p >= 1.0
    num_kept = torch.where(off, top_k, torch.minimum(num_kept, top_k))
    enough = cut_by_k | off | (mass[:, -1] >= needed)
    return num_kept, enough
