"""OpenVINO GenAI's continuous batching; of GGUF files it reads fp16 and quantized ones, so the
weights come as fp16; it computes in the work's dtype.
"""

import openvino
import openvino_genai
from protocol import serve, workload

HINTS = {"float32": "f32", "bfloat16": "bf16"}


def main() -> None:
    work = workload()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = work["max_num_batched_tokens"]
    scheduler.max_num_seqs = work.get("max_num_seqs", 256)
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    hint = HINTS[work["dtype"]]
    properties = {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
    pipeline = openvino_genai.ContinuousBatchingPipeline(f"{work['gguf']}/float16.gguf", scheduler, "CPU", properties)

    def config(request: dict) -> openvino_genai.GenerationConfig:
        """Return greedy sampling up to the request's length."""
        chosen = openvino_genai.GenerationConfig()
        chosen.max_new_tokens = request["output"]
        chosen.ignore_eos = True
        chosen.do_sample = False
        return chosen

    def generate(requests: list[dict]) -> list[list[int]]:
        prompts = [openvino.Tensor([request["prompt"]]) for request in requests]
        results = pipeline.generate(prompts, [config(request) for request in requests])
        return [list(result.m_generation_ids[0]) for result in results]

    serve(generate, version=openvino_genai.__version__)


if __name__ == "__main__":
    main()
