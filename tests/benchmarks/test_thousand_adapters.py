"""Test the benchmark of many adapters: its requests, its counts, and how it joins two runs."""

import json

import pytest

from minivllm.core.adapter_slots import AdapterSlots


@pytest.mark.parametrize("adapters", [5, 50, 1000])
def test_a_batch_has_five_adapters_however_many_there_are(bench, adapters: int):
    wishes = bench.in_groups(adapters, bench.REQUESTS)
    assert set(wishes) == set(range(1, adapters + 1))
    batches = [wishes[start : start + bench.PLACES] for start in range(0, len(wishes), bench.PLACES)]
    assert {len(set(batch)) for batch in batches} == {5}


def test_each_kind_has_the_same_number_of_requests(bench):
    wishes = bench.wishes_of((5, 50), 400, seed=0)
    assert list(wishes) == ["none", "five in a batch, 5", "five in a batch, 50", "Zipf, 5", "Zipf, 50"]
    assert {len(some) for some in wishes.values()} == {400}
    assert set(wishes["none"]) == {0}


def test_copies_are_counted_and_slots_stay_the_engines(bench):
    bench.Counting.copies = 0
    counting, plain = bench.Counting(2), AdapterSlots(2)
    for adapter in (1, 2, 1, 3, 2, 2):
        assert counting.activate(adapter) == plain.activate(adapter)
    assert bench.Counting.copies == 4


def test_one_engine_serves_all_and_counts_right(bench, tmp_path):
    engine = bench.Engine(bench.write_random_adapters(tmp_path, 6, 4))
    prompts = bench.prompts_of(24, seed=0)
    result = engine.serve(prompts, bench.in_groups(6, 24))
    assert result["copies"] == 6
    assert result["adapters_in_a_step"] == 3.0  # twenty requests with five adapters, then four with one
    assert engine.serve(prompts, [0] * 24)["adapters_in_a_step"] == 0


def test_flat_compares_the_most_with_the_fewest(bench):
    kinds = {f"five in a batch, {count}": {"requests_per_second": rate} for count, rate in ((5, 200.0), (50, 180.0))}
    assert bench.flatness(kinds, (5, 50)) == pytest.approx(0.9)
    turns = [{"seconds": seconds, "adapters_in_a_step": 5.0, "copies": 3} for seconds in (2.0, 1.0, 4.0)]
    figures = bench.figures_of(turns, 100)
    assert figures["requests_per_second"] == 50
    assert figures["spread"] == [25, 100]


def test_the_peers_figures_join_ours(bench, tmp_path):
    path = tmp_path / "results.json"
    assert bench.joined(str(path), {"peer": 1}) == {"peer": 1}
    path.write_text(json.dumps({"name": "thousand_adapters", "figures": {"flat": 0.9, "peer": 0}}))
    assert bench.joined(str(path), {"peer": 1}) == {"flat": 0.9, "peer": 1}
