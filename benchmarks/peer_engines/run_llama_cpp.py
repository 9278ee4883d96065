"""llama.cpp's server loop, through `xllamacpp`, with a seat for each request and one cache that all
share.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import xllamacpp
from protocol import serve, workload


def main() -> None:
    work = workload()
    requests = work["requests"]
    params = xllamacpp.CommonParams()
    params.model.path = f"{work['gguf']}/{work['dtype']}.gguf"
    params.n_parallel = len(requests)
    params.kv_unified = True
    params.n_ctx = sum(len(r["prompt"]) + r["output"] + 1 for r in requests)
    params.n_batch = params.n_ubatch = work["max_num_batched_tokens"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.cache_prompt = False
    params.n_gpu_layers = 0
    params.warmup = True
    for name, value in work.get("options", {}).items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    callers = ThreadPoolExecutor(len(requests))

    def one(request: dict) -> list[int]:
        """Serve one request."""
        asked = {
            "prompt": request["prompt"],
            "n_predict": request["output"],
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        text = server.handle_completions(asked)["choices"][0]["text"]
        return [int(digits) for digits in re.findall(r"\d+", text)]  # the file names token 7 "<7>"

    serve(lambda chosen: list(callers.map(one, chosen)), version=xllamacpp.__version__)


if __name__ == "__main__":
    main()
