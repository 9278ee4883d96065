"""The widgets' pictures that the lessons' texts show are what the widgets draw today."""

from pathlib import Path

import pytest
from pictures import differences

from widgets.__main__ import main
from widgets.disaggregation_state import experiment

FIGURES = Path(__file__).resolve().parents[2] / "lessons" / "figures"


@pytest.fixture(autouse=True)
def nothing_has_been_run():
    """A widget shows every point that was run in its process, those of other tests too."""
    experiment.cache_clear()


@pytest.mark.parametrize(
    ("widget", "picture"),
    [
        ("kv_cache", "01_ledger.svg"),
        ("paged_attention", "02_pool.svg"),
        ("flash_attention", "03_tiles.svg"),
        ("continuous_batching", "04_slots.svg"),
        ("prefix_caching", "05_prefix_cache.svg"),
        ("optimization_catalog", "05_levers.svg"),
        ("serving", "06_layouts.svg"),
        ("speculative_decoding", "07_speedup.svg"),
        ("disaggregation", "08_goodput.svg"),
        ("attention_heads", "09_ranks.svg"),
        ("chunked_prefill", "10_budget.svg"),
        ("preemption", "11_cliff.svg"),
        ("multi_lora", "12_slots.svg"),
    ],
)
def test_the_picture_in_the_lesson_is_the_widgets(widget: str, picture: str, tmp_path: Path):
    main([widget, str(tmp_path / picture)])
    drawn, shown = ((folder / picture).read_text() for folder in (tmp_path, FIGURES))
    assert not differences(drawn, shown), f"uv run python -P -m widgets {widget} lessons/figures/{picture}"
