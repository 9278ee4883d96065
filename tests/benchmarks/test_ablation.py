"""Test the ablation: its arithmetic, its levers, and that the pages show what was measured."""

import json
import math
import sys
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import contents, contents_differ
from repository import ROOT

from minivllm.config import EMBEDDED_MODEL
from minivllm.models.linear import weight_bytes
from minivllm_lab.engines.inside import runner_of

RESULTS = ROOT / "benchmarks/results/ablation.cpu.json"


@pytest.fixture(scope="module")
def shapley(load_benchmark):
    return load_benchmark("shapley")


def test_every_round_runs_all_in_an_order_of_its_own(bench):
    sets = bench.configurations([lever.name for lever in bench.LEVERS])
    turns = bench.turns_of(sets, rounds=2, seed=0)
    orders = [[on for index, on in turns if index == which] for which in (0, 1)]
    assert orders[0] != orders[1]
    for order in orders:
        counts = {on: order.count(on) for on in sets}
        assert sorted(counts.values()) == [1] * (len(sets) - 1) + [3]
        (reference,) = (on for on, count in counts.items() if count == 3)
        assert reference == {lever.name for lever in bench.LEVERS} - set(bench.ALONE)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.floats(-9, 9), min_size=2**n, max_size=2**n)))
@settings(deadline=None)
def test_a_shapley_value_is_the_mean_over_all_orders(shapley, numbers):
    levers = [f"lever {index}" for index in range(int(math.log2(len(numbers))))]
    worth = dict(zip(shapley.subsets(levers), numbers, strict=True))
    values = shapley.shapley_values(levers, worth)
    for lever in levers:
        gains = []
        for order in permutations(levers):
            before = frozenset(order[: order.index(lever)])
            gains.append(worth[before | {lever}] - worth[before])
        assert values[lever] == pytest.approx(sum(gains) / len(gains), abs=1e-9)
    assert sum(values.values()) == pytest.approx(worth[frozenset(levers)] - worth[frozenset()], abs=1e-9)


def test_every_lever_off_or_on_is_a_setting_that_the_engine_has_and_exact_ones_leave_the_text(bench, tmp_path):
    """The engine serves the work within the budget with every lever off or on, and each exact one
    leaves the tokens unchanged.
    """
    work = bench.Work("small", [[5, 6, 7, 8] * 12, [5, 6, 7, 8] * 12 + [9, 10], list(range(20, 90))], [9, 12, 6])
    names = [lever.name for lever in bench.LEVERS if lever.name not in bench.ALONE]
    exact = frozenset(name for name in names if bench.BY_NAME[name].exact)
    outputs = []
    for on in (exact, frozenset(), *(exact - {name} for name in sorted(exact))):
        core = bench.engine_of(on, tmp_path, "cpu")
        actual = bench.serve(core, work)
        outputs.append(actual["outputs"])
        assert [len(tokens) for tokens in actual["outputs"]] == work.outputs
        cache = sum(
            tensor.nbytes for layer in runner_of(core).attention.kv_caches for tensor in layer if tensor is not None
        )
        block = cache // core.scheduler.cache_config.num_gpu_blocks
        assert cache - block + weight_bytes(runner_of(core).model) <= bench.budget("cpu"), "the null block comes on top"
    assert all(output == outputs[0] for output in outputs)


def test_the_model_without_groups_keeps_four_times_as_much(bench, tmp_path):
    folder = sys.modules["levers"].ungrouped_model(tmp_path)
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (EMBEDDED_MODEL, folder))
    assert theirs["num_key_value_heads"] == ours["num_attention_heads"] == 4 * ours["num_key_value_heads"]


def test_the_pages_and_the_figure_show_what_was_measured(bench, tmp_path):
    record = json.loads(RESULTS.read_text())
    stale = [page.name for page, text in bench.pages(record).items() if page.read_text() != text]
    assert stale == [], "benchmarks/ablation.py --from … --readme"
    bench.draw(record, str(tmp_path / "ablation.svg"))
    drawn, shown = contents(tmp_path / "ablation.svg"), contents(ROOT / "lessons/figures/05_ablation.svg")
    assert not contents_differ(drawn, shown), "benchmarks/ablation.py --from … --plot"
