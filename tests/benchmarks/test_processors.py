"""Test that a benchmark's results file keeps what was measured on other kinds of processor."""

import json

import pytest


@pytest.fixture(scope="module")
def peers(load_benchmark):
    return load_benchmark("peers")


def of(cpu: str, date: str = "2026-01-01", name: str = "peers", cores: int = 2, **more) -> dict:
    return {"name": name, "date": date, "machine": {"cpu": cpu, "cores": cores}, **more}


def test_another_processor_is_kept_and_so_is_the_same_one_with_more_cores(bench, tmp_path):
    path = tmp_path / "results.json"
    for result in (of("AMD"), of("Intel"), of("AMD", cores=8), of("Intel", "2026-02-02")):
        path.write_text(json.dumps(bench.with_others(path, result)))
    kept = [(entry["date"], entry["machine"]) for entry in bench.all_kinds(json.loads(path.read_text()))]
    old = "2026-01-01"
    amd, larger = ((old, {"cpu": "AMD", "cores": cores}) for cores in (2, 8))
    assert kept == [("2026-02-02", {"cpu": "Intel", "cores": 2}), larger, amd]


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


def test_processors_of_one_name_differ_by_their_vector_instructions(bench):
    result = of("AMD")
    result["machine"]["vectors"] = ["avx2", "avx512f"]
    assert bench.kind_of(result) == "AMD (avx2, avx512f), 2 cores"


def rows(ours: float, peers: dict[str, float]) -> dict:
    """Return a comparison in fp32: our rate, and as a multiple of each peer's with many requests."""
    rates = {"1": 100.0, "128": ours}
    ours_row = {"minivllm fp32": {"rates": rates, "ours_of_it": {"1": 1.0, "128": 1.0}}}
    others = {f"{name} fp32": {"rates": rates, "ours_of_it": {"1": 2.0, "128": ratio}} for name, ratio in peers.items()}
    return {"peers": ours_row | others}


def test_each_kind_of_processor_is_compared_with_its_best_peer(peers):
    result = of("Intel", figures=rows(5000, {"vLLM": 1.3, "OpenVINO GenAI": 0.8}))
    result |= {"other_processors": [of("AMD", figures=rows(7000, {"vLLM": 1.2}))]}
    _, cells = peers.table_of_processors(result)
    assert [(cell[0], cell[-1]) for cell in cells] == [
        ("Intel, 2 cores", "5,000 (0.80 × OpenVINO GenAI fp32)"),
        ("AMD, 2 cores", "7,000 (1.20 × vLLM fp32)"),
    ]
