"""`transformers` `generate`: one request at a time, or static batches with the prompts padded on
the left.
"""

import torch
import transformers
from protocol import serve, workload
from transformers import AutoConfig, AutoModelForCausalLM

PAD = 0


def main() -> None:
    work = workload()
    dtype, batch = getattr(torch, work["dtype"]), work["batch"]
    if work["load_format"] == "dummy":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work["model"]), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype)
    model = model.to(work["device"]).eval()
    model.generation_config.eos_token_id = None  # every request runs to its length

    @torch.inference_mode()
    def together(requests: list[dict]) -> list[list[int]]:
        """Generate one batch up to the length of its longest request, and drop what a request
        generated beyond its own length.
        """
        longest = max(len(request["prompt"]) for request in requests)
        padding = [longest - len(request["prompt"]) for request in requests]
        rows = [[PAD] * pad + request["prompt"] for pad, request in zip(padding, requests, strict=True)]
        seen = [[0] * pad + [1] * len(request["prompt"]) for pad, request in zip(padding, requests, strict=True)]
        ids, mask = torch.tensor(rows, device=model.device), torch.tensor(seen, device=model.device)
        steps = max(request["output"] for request in requests)
        made = model.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=PAD)
        return [row[longest : longest + r["output"]].tolist() for row, r in zip(made, requests, strict=True)]

    def generate(requests: list[dict]) -> list[list[int]]:
        parts = [requests[first : first + batch] for first in range(0, len(requests), batch)]
        return [tokens for part in parts for tokens in together(part)]

    serve(generate, version=transformers.__version__)


if __name__ == "__main__":
    main()
