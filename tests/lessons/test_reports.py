"""Test a script's conclusions: all of them on a quiet machine, only counted ones on a disturbed
one.
"""

import json

import pytest
from lessons.harness import REPOSITORY

from minivllm_lab.continuous_batching import report as continuous_batching
from minivllm_lab.kv_cache import report as kv_cache
from minivllm_lab.optimization_catalog import report as optimization_catalog

CLOSINGS = {
    "01_kv_cache": (lambda actual, disturbance: kv_cache.close(actual, disturbance), 1),
    "04_continuous_batching": (lambda actual, disturbance: continuous_batching.close(actual, 8, disturbance), 2),
    "05_optimization_catalog": (lambda actual, disturbance: optimization_catalog.close(actual, disturbance), 2),
}


@pytest.mark.parametrize("script", CLOSINGS)
def test_conclusions_from_timings_are_withheld_where_the_machine_was_disturbed(script, capsys):
    close, counted = CLOSINGS[script]

    def said() -> list[str]:
        return [" ".join(sentence.split()) for sentence in capsys.readouterr().out.split("•")[1:]]

    result = json.loads((REPOSITORY / "benchmarks" / "results" / f"{script}.cpu.json").read_text())["figures"]
    close(result, "")
    sentences = said()
    assert len(sentences) == 3
    close(result, "a neighbour was busy")
    *kept, last = said()
    assert len(kept) == counted
    assert set(kept) < set(sentences)
    assert "disturbed (a neighbour was busy): no conclusion from timings" in last
