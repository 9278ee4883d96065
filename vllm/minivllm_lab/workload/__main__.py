"""Predict what your workload does on a vLLM server, each figure with its usual error.

python -m minivllm_lab.workload Llama-3.1-8B --gpu H100                               # Azure's conversations
python -m minivllm_lab.workload Llama-3.1-70B --gpu H200 --tp 4 --load result.json    # `vllm bench serve --save-result`
python -m minivllm_lab.workload Qwen3-8B --gpu L4 --load requests.csv                 # arrival, prompt, output
python -m minivllm_lab.workload Qwen3-8B --gpu H100 --load 1024:128 --clients 16      # prompts of 1,024, answers of 128
python -m minivllm_lab.workload Qwen3-8B --gpu H100 --load result.json --compare result.json
python -m minivllm_lab.workload --errors                                              # where the errors come from
"""

from __future__ import annotations

import argparse

from minivllm_lab.calculator import add_server_flags
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.workload.report import report
from minivllm_simulate.workloads import WORKLOADS


def parser() -> argparse.ArgumentParser:
    """Return the command's flags, named as vLLM's where it has the same."""
    flags = Parser(prog="minivllm_lab.workload", description=__doc__)
    flags.add_argument("model", nargs="?", help="a well-known model, a model directory, or a name on the hub")
    add_server_flags(flags)
    flags.add_argument("--vllm", default="0.33", metavar="VERSION", help="0.6 to 0.33 (default: 0.33)")
    flags.add_argument(
        "--load", default="azure-conversation",
        help=f"PROMPT:OUTPUT tokens, a CSV file, a benchmark's result, or one of {', '.join(WORKLOADS)}",
    )  # fmt: skip
    flags.add_argument("--rate", type=float, help="requests a second (default: the load's own)")
    flags.add_argument("--clients", type=positive_int, help="clients with one request each, instead of a rate")
    flags.add_argument("--requests", type=positive_int, default=400, help="how many are simulated (default: 400)")
    flags.add_argument(
        "--compare", metavar="FILE", help="a result of `vllm bench serve --save-result` to put beside it"
    )
    flags.add_argument("--errors", action="store_true", help="print the table of errors and its sources")
    flags.add_argument("--write", action="store_true", help="with --errors: simulate all rows again, write the page")
    return flags


if __name__ == "__main__":
    run(report, parser())
