"""Test that a benchmark's results file keeps what was measured on other kinds of processor."""

import json

import pytest


@pytest.fixture(scope="module")
def peers(load_benchmark):
    return load_benchmark("peers")


def of(cpu: str, date: str = "2026-01-01", name: str = "peers", cores: int = 2, **more) -> dict:
    return {"name": name, "date": date, "machine": {"cpu": cpu, "cores": cores}, **more}


def test_another_processor_is_kept(bench, tmp_path):
    path = tmp_path / "results.json"
    for result in (of("AMD"), of("Intel"), of("Arm"), of("Intel", "2026-02-02")):
        path.write_text(json.dumps(bench.with_others(path, result)))
    kept = bench.all_kinds(json.loads(path.read_text()))
    assert [(entry["machine"]["cpu"], entry["date"]) for entry in kept] == [
        ("Intel", "2026-02-02"),
        ("Arm", "2026-01-01"),
        ("AMD", "2026-01-01"),
    ]


def test_the_same_processor_with_more_cores_is_another_kind(bench, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(of("AMD", cores=8)))
    assert len(bench.all_kinds(bench.with_others(path, of("AMD")))) == 2


@pytest.mark.parametrize("content", [None, "no JSON", json.dumps(of("Intel", name="another"))])
def test_a_file_that_holds_nothing_of_it_adds_nothing(bench, tmp_path, content):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    assert bench.with_others(path, of("AMD")) == of("AMD")


def test_a_record_read_again_keeps_its_own_others(bench, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(bench.with_others(path, of("AMD"))))
    result = of("Intel", other_processors=[of("Arm")])
    kept = bench.all_kinds(bench.with_others(path, result))
    assert [entry["machine"]["cpu"] for entry in kept] == ["Intel", "Arm", "AMD"]


def rates(ours: float, vllm: float) -> dict:
    """Return fp32 rates that were measured in turns; vLLM's row has our rate as a multiple of its
    own.
    """
    return {"peers": {"minivllm fp32": {"all": ours, "ours_of_it": 1.0}, "vLLM fp32": {"all": vllm, "ours_of_it": 1.3}}}


def test_each_kind_of_processor_has_a_row(peers):
    result = of("Intel", figures=rates(5000, 4000), other_processors=[of("AMD", figures=rates(7000, 5000))])
    _, rows = peers.table_of_processors(result)
    assert rows[0] == ("Intel, 2 cores", "2026-01-01", "5,000", "1.30 ×", "", "")
    assert rows[1][0] == "AMD, 2 cores"
