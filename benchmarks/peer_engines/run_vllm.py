"""vLLM itself on a CPU, with its best settings on this machine: engine core in this process, all
cores, no prefix cache.
"""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from protocol import lora_ids, serve, workload


def main() -> None:
    from vllm.lora.request import LoRARequest

    import vllm

    work = workload()
    llm = vllm.LLM(
        work["model"],
        dtype=work["dtype"],
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
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=r["output"], ignore_eos=True, detokenize=False)
            for r in requests
        ]
        named = [one and LoRARequest(f"adapter-{one[0]}", *one) for one in lora_ids(requests)]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=named if any(named) else None)
        return [list(output.outputs[0].token_ids) for output in outputs]

    serve(generate, version=vllm.__version__)


if __name__ == "__main__":
    main()
