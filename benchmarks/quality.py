"""Measure what fewer bits cost in prediction quality: loss on held-out text, and the bytes of each
format.

    uv run python benchmarks/quality.py

For each combination of formats for the KV cache and the weights, one engine reads the same texts on
this machine. The table is followed by one line of JSON. Loss is in nats per token; agreement is the
share of positions at which the likeliest token is that of the first row. The bytes of weights are
those of the projections in the layers, which is what `quantization` stores differently. The JSON
also has everything that the engine counts: the embedding and the rotary table, and in fp32 the
head, whose weights are those of the embedding once more, in panels.
"""

import argparse

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL
from minivllm.models.decoder import Decoder
from minivllm.models.linear import Linear, weight_bytes
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.inside import core_of, runner_of
from minivllm_lab.progress import track
from minivllm_lab.quality import held_out_tokens, read
from minivllm_lab.results import record, report
from minivllm_lab.tables import table

WAYS = {
    "float32": {},
    "KV int8": {"kv_cache_dtype": "int8"},
    "weights int8": {"quantization": "int8"},
    "weights int4": {"quantization": "int4"},
    "weights int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "weights int4, KV int8": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "bfloat16, KV too": {"dtype": "bfloat16"},
}


def main(arguments: argparse.Namespace) -> None:
    """Read the texts with each combination of formats, and compare each with the first."""
    figures, rows, first = {}, [], None
    for name, settings in track(WAYS.items(), "reading"):
        settings = {"dtype": "float32", **settings}
        llm = LLM(arguments.model, device="cpu", max_num_seqs=8, **settings)
        core = core_of(llm)
        projections = projection_bytes(runner_of(core).model)
        texts = held_out_tokens(llm, arguments.texts, arguments.tokens)
        reading = read(llm, texts)
        first = first or reading
        assert core.ledger is not None
        added, agreement = reading.loss - first.loss, reading.agreement(first)
        figures[name] = {
            "projection_bytes": projections,
            "weight_bytes": weight_bytes(runner_of(core).model),
            "bytes_per_token": core.ledger.bytes_per_token,
            "loss": round(reading.loss, 5),
            "loss_added": round(added, 5),
            "agreement": round(agreement, 4),
        }
        sizes = (f"{projections / 1e6:.2f}", core.ledger.bytes_per_token)
        rows.append((name, *sizes, f"{reading.loss:.4f}", f"{added:+.4f}", f"{agreement:.1%}"))
    title = f"{arguments.texts} held-out texts of {arguments.tokens} tokens"
    table(title, ("stored as", "MB of matrices", "KV bytes per token", "loss", "added", "agreement"), rows)
    outcome = {"texts": arguments.texts, "tokens": arguments.tokens, "ways": figures}
    report(record("quality", outcome), arguments.json)


def projection_bytes(model: Decoder) -> int:
    """Count the bytes of the layers' matrices as stored: in panels, plain, or as integers with
    their scales.
    """
    return sum(weight_bytes(linear) for linear in model.layers.modules() if isinstance(linear, Linear))


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--model", default=str(EMBEDDED_MODEL), help="the model's folder or name")
    flags.add_argument("--texts", type=positive_int, default=16, help="number of texts (default: 16)")
    flags.add_argument("--tokens", type=positive_int, default=512, help="tokens per text (default: 512)")
    return flags


if __name__ == "__main__":
    run(main, parser())
