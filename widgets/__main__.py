"""Write a widget's first picture to a file: `uv run python -P -m widgets serving layouts.svg`."""

import argparse
from importlib import import_module
from pathlib import Path

import widgets

FIGURES = Path(__file__).resolve().parents[1] / "lessons" / "figures"
IN_LESSONS = {
    "kv_cache": "01_ledger.svg",
    "paged_attention": "02_pool.svg",
    "flash_attention": "03_tiles.svg",
    "continuous_batching": "04_slots.svg",
    "prefix_caching": "05_prefix_cache.svg",
    "optimization_catalog": "05_levers.svg",
    "serving": "06_layouts.svg",
    "speculative_decoding": "07_speedup.svg",
    "disaggregation": "08_goodput.svg",
    "attention_heads": "09_ranks.svg",
    "chunked_prefill": "10_budget.svg",
    "preemption": "11_cliff.svg",
    "multi_lora": "12_slots.svg",
}
"""The file in `lessons/figures` that shows each widget in its lesson."""
LESSON_WIDTH = 720


def main(argv: list[str] | None = None) -> None:
    """Draw the picture at the width of the lessons' figures."""
    parser = argparse.ArgumentParser(prog="widgets", description=__doc__)
    parser.add_argument("widget", choices=widgets.names())
    parser.add_argument("file", type=Path, nargs="?", help="default: the figure in the widget's lesson")
    arguments = parser.parse_args(argv)
    spec = import_module(f"widgets.{arguments.widget}").SPEC
    file = arguments.file or FIGURES / IN_LESSONS[arguments.widget]
    file.write_text(spec.figure(spec.complete(), width=LESSON_WIDTH))


if __name__ == "__main__":
    main()
