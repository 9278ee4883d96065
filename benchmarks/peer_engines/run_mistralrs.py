"""mistral.rs; it takes text, so the tokenizer of its copy of the model writes each id as a word of
equal width.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from mistralrs import Architecture, ChatCompletionRequest, ModelDType, Runner, Which
from protocol import serve, workload

ARCHITECTURES = {"llama": Architecture.Llama, "qwen3": Architecture.Qwen3}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WIDTH = 6
"""Digits of a word."""

DTYPES = {"float32": ModelDType.F32, "bfloat16": ModelDType.BF16}


def tokenizer(vocab_size: int) -> dict:
    """Return a tokenizer whose words are the ids; id `vocab_size`, which no model generates, ends a
    text.
    """
    end = {"id": vocab_size, "content": "<end>", "special": True}
    end |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "WordLevel",
            "vocab": {f"{i:0{WIDTH}}": i for i in range(vocab_size)} | {"<end>": vocab_size},
            "unk_token": f"{0:0{WIDTH}}",
        },
    }


def copy_with_words(folder: Path, copy: Path) -> str:
    """Copy a model folder, with that tokenizer, and return its model type."""
    config = json.loads((folder / "config.json").read_text())
    words = tokenizer(config["vocab_size"])
    shutil.copy(folder / "model.safetensors", copy)
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": config["vocab_size"]}))
    (copy / "tokenizer.json").write_text(json.dumps(words))
    (copy / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "bos_token": None, "chat_template": CHAT_TEMPLATE})
    )
    return config["model_type"]


def main() -> None:
    work = workload()
    with tempfile.TemporaryDirectory() as name:
        kind = copy_with_words(Path(work["model"]), Path(name))
        which = Which.Plain(model_id=name, arch=ARCHITECTURES[kind], dtype=DTYPES[work["dtype"]])
        runner = Runner(which=which, max_seqs=len(work["requests"]), prefix_cache_n=0)

    def start(request: dict) -> Iterator:
        """Hand a request over; only a streamed one leaves the runner free for the next."""
        asked = ChatCompletionRequest(
            messages=[{"role": "user", "content": " ".join(f"{i:0{WIDTH}}" for i in request["prompt"])}],
            model="default",
            max_tokens=request["output"],
            temperature=0.0,
            ignore_eos=True,
            stream=True,
        )
        return runner.send_chat_completion_request(asked)

    def generate(requests: list[dict]) -> list[list[int]]:
        streams = [start(request) for request in requests]
        texts = ["".join(chunk.choices[0].delta.content or "" for chunk in stream) for stream in streams]
        return [[int(text[first : first + WIDTH]) for first in range(0, len(text), WIDTH)] for text in texts]

    serve(generate, version=version("mistralrs"))


if __name__ == "__main__":
    main()
