"""Test that the ledger's variants replace code that exists, and that its table matches the results."""

import importlib
from pathlib import Path

from refusals import assert_refused

from minivllm_lab.marks import put_between_marks
from minivllm_lab.results import read_record

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_what_a_variant_replaces_is_there(bench):
    for variant in (*bench.KEPT, *bench.REJECTED):
        assert (variant.patch is None) != (variant.environment is None)
        if variant.patch:
            module, name, value = variant.patch
            assert getattr(importlib.import_module(module), name) != value, variant.title


def test_the_page_shows_the_ledger_that_was_measured(bench):
    record = read_record(BENCHMARKS / "results/steps.cpu.json", "steps")
    page = (BENCHMARKS / "PERFORMANCE.md").read_text()
    assert set(record["figures"]) == {variant.title for variant in bench.LEDGER}
    assert put_between_marks(page, "ledger", bench.ledger_text(record["figures"], record["machine"])) == page


def test_a_variant_that_is_an_environment_is_not_measured_in_another(bench, monkeypatch):
    for variant in bench.VARIANTS.values():
        if variant.environment:
            monkeypatch.delenv(variant.environment[0], raising=False)
            assert_refused("=".join(variant.environment), bench.check_environment, variant)
            monkeypatch.setenv(*variant.environment)
        bench.check_environment(variant)


def test_a_part_inside_another_is_counted_once(bench):
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    watch = bench.Stopwatch(lambda: now[0])
    inner = watch.watch("inner", lambda: wait(2.0))
    outer = watch.watch("outer", lambda: (wait(1.0), inner(), wait(4.0)))
    outer()
    inner()
    assert watch.seconds == {"outer": 5.0, "inner": 4.0}
