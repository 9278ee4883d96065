"""Our engine, as `benchmarks/peers.py` runs it."""

from protocol import lora_ids, serve, workload

from minivllm.entrypoints.llm import LLM
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams


def main() -> None:
    work = workload()
    llm = LLM(
        work["model"],
        dtype=work["dtype"],
        device=work["device"],
        load_format=work["load_format"],
        max_model_len=work["max_model_len"],
        max_num_seqs=work.get("max_num_seqs", 256),
        max_num_batched_tokens=work["max_num_batched_tokens"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        speculative_config=work.get("speculative_config"),
        **({"enable_lora": True, **work["lora"]} if "lora" in work else {}),
    )

    def generate(requests: list[dict]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        params = [SamplingParams(temperature=0.0, max_tokens=r["output"], ignore_eos=True) for r in requests]
        named = [one and LoRARequest(f"adapter-{one[0]}", *one) for one in lora_ids(requests)]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=named if any(named) else None)
        return [output.outputs[0].token_ids for output in outputs]

    serve(generate)


if __name__ == "__main__":
    main()
