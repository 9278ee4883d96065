"""What a smaller KV cache costs in prediction: loss on text that the embedded model never saw, beside bytes a token.

    uv run python benchmarks/quality.py

The same texts are read by one engine for each kind of cache, on this machine. The table is followed by one line of
JSON. Loss is in nats per token; agreement is the share of positions at which the likeliest token is the one of the
first row.
"""

import argparse
import json

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.quality import held_out_tokens, read
from minivllm.lab.cli import Parser, positive_int, run
from minivllm.lab.progress import track
from minivllm.lab.results import record, write_json
from minivllm.lab.tables import table

CACHES = {
    "float32": {"dtype": "float32"},
    "int8, a scale for each token and head": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "bfloat16, weights too": {"dtype": "bfloat16"},
}


def main(arguments: argparse.Namespace) -> None:
    """Read with each kind of cache, compare with the first."""
    figures, rows, first = {}, [], None
    for name, settings in track(CACHES.items(), "reading"):
        llm = LLM(arguments.model, device="cpu", max_num_seqs=8, show_ledger=False, **settings)
        texts = held_out_tokens(llm, arguments.texts, arguments.tokens)
        reading, ledger = read(llm, texts), llm.llm_engine.core.ledger
        first = first or reading
        assert ledger is not None
        figures[name] = {
            "bytes_per_token": ledger.bytes_per_token,
            "loss": round(reading.loss, 5),
            "loss_added": round(reading.loss - first.loss, 5),
            "agreement": round(reading.agreement(first), 4),
        }
        added, agreement = f"{reading.loss - first.loss:+.4f}", f"{reading.agreement(first):.1%}"
        rows.append((name, ledger.bytes_per_token, f"{reading.loss:.4f}", added, agreement))
    title = f"{arguments.texts} held-out texts of {arguments.tokens} tokens"
    table(title, ("KV cache", "bytes a token", "loss", "added", "agreement"), rows)
    outcome = {"texts": arguments.texts, "tokens": arguments.tokens, "caches": figures}
    if arguments.json:
        write_json(arguments.json, "quality", outcome)
    print(json.dumps(record("quality", outcome)))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default=str(EMBEDDED_MODEL), help="another model's folder or name")
    flags.add_argument("--texts", type=positive_int, default=16, help="how many texts (default: 16)")
    flags.add_argument("--tokens", type=positive_int, default=512, help="tokens of each (default: 512)")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
