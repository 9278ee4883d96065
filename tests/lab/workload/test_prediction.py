"""Rules that a prediction obeys, whatever its constants are; and what a measurement is said to contradict."""

from dataclasses import replace

import pytest

from minivllm_lab.workload.load import drawn_lengths, make_load
from minivllm_lab.workload.prediction import METRICS, Prediction, explain
from minivllm_lab.workload.server import GENERATIONS, Constants, Server, capacity
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model

CHATS = drawn_lengths("~300", "~150", 200)


def server(model: str = "Llama-3.1-8B", gpu: str = "H100", **fields) -> Server:
    return Server(known_model(model), get_hardware(gpu), max_model_len=4096, **fields)


def predicted(how: Server, **arriving) -> Prediction:
    return Prediction(how, make_load("chats", CHATS, **arriving))


def test_more_load_never_helps_a_client():
    runs = [predicted(server(), rate=rate).figures() for rate in (1, 4, 16, 64)]
    for metric in ("TTFT p50, ms", "TTFT p99, ms", "gap p50, ms"):
        values = [run[metric] for run in runs]
        assert values == sorted(values), metric
    served = [run["requests/s"] for run in runs]
    assert served == sorted(served)


def test_more_clients_get_more_tokens_in_total_and_fewer_each():
    runs = [predicted(server(), clients=clients).figures() for clients in (1, 4, 16, 64)]
    total = [run["output tokens/s"] for run in runs]
    gaps = [run["gap p50, ms"] for run in runs]
    assert total == sorted(total)
    assert gaps == sorted(gaps)


@pytest.mark.parametrize(
    ("version", "longest", "alone"), [("0.6", 4096, True), ("0.7", 1 << 16, False), ("0.8", 4096, False)]
)
def test_v0_computes_prompts_in_steps_of_their_own_unless_they_may_be_long(version: str, longest: int, alone: bool):
    how = replace(server(version=version), max_model_len=longest)
    steps = predicted(how, rate=8).measured.run.steps
    mixed = [step for step in steps if min(step.scheduled.values()) == 1 < max(step.scheduled.values())]
    assert bool(mixed) != alone


def test_a_larger_model_leaves_room_for_fewer_tokens_and_has_an_earlier_knee():
    small, large = server("Qwen3-8B"), server("Qwen3-14B")
    assert large.kv_tokens < small.kv_tokens / 1.2
    assert capacity(large, 300, 150) < capacity(small, 300, 150)


def test_the_knee_is_where_arrival_meets_capacity():
    how = server(gpu="A100-80", max_num_seqs=32)
    knee = capacity(how, 300, 150)

    def waits(share: float, count: int) -> float:
        load = make_load("even", drawn_lengths(300, 150, count), rate=share * knee, burstiness=1e4)
        return Prediction(how, load).figures()["TTFT p99, ms"]

    assert waits(0.8, 400) < 1.2 * waits(0.8, 200), "below the knee the queue does not grow"
    assert waits(1.4, 400) > 1.7 * waits(1.4, 200), "above it, it grows for as long as requests arrive"


@pytest.mark.parametrize("shape", [StepShape.of([(1, 500)]), StepShape.of([(1, 500)] * 128), StepShape.of([(2048, 0)])])
def test_a_step_costs_more_than_its_bytes_and_a_part_of_it_is_each_generation_s_own(shape: StepShape):
    costs = {host.since: server(version=f"0.{host.since}").cost for host in GENERATIONS}
    for host in GENERATIONS:
        cost = costs[host.since]
        assert cost.seconds(shape) > cost.device.roofline.floor_seconds(shape)
        own = host.step + host.request * shape.num_reqs
        assert cost.seconds(shape) - own == pytest.approx(costs[14].seconds(shape))


def test_all_reduces_take_time_and_more_for_more_tokens():
    one, four = (server("Llama-3.1-70B", "H200", tp=tp).cost for tp in (2, 8))
    few, many = StepShape.of([(1, 500)]), StepShape.of([(4096, 0)])
    assert 0 < four.link_seconds(few) < four.link_seconds(many)
    assert one.link_seconds(many) < four.link_seconds(many)
    assert server().cost.link_seconds(many) == 0


def test_defaults_are_those_of_the_version_and_the_gpu():
    assert (server(version="0.19").utilization, server(version="0.20").utilization) == (0.9, 0.92)
    budgets = [server("Qwen3-0.6B", gpu).budget for gpu in ("H200", "A100-80", "L4")]
    assert budgets == [8192, 2048, 2048]


def as_result(prediction: Prediction) -> dict[str, float]:
    figures = prediction.figures()
    tpot = prediction.measured.metric("tpot_mean_ms")
    return {theirs: figures[name] for name, (_, theirs, _) in METRICS.items()} | {"mean_tpot_ms": tpot}


def test_a_prediction_that_comes_true_contradicts_nothing():
    prediction = predicted(server(), clients=8)
    assert explain(prediction, as_result(prediction)) == [
        "Every metric is within twice its usual error: no assumption is contradicted."
    ]


def test_a_slow_memory_is_found_in_the_steps():
    slow = predicted(server(constants=Constants(memory=0.2)), clients=8)
    said = explain(predicted(server(), clients=8), as_result(slow))
    assert said[0].startswith("Steps: ")
    assert "decodes read at 2" in said[0]


def test_a_slow_front_end_is_found_in_first_tokens():
    hosts = tuple(replace(host, first=0.9) for host in GENERATIONS)
    said = explain(predicted(server(), clients=8), as_result(predicted(server(hosts=hosts), clients=8)))
    assert len(said) == 1
    assert said[0].startswith("Front end: ")
    assert "take 900 ms" in said[0]


def test_fewer_requests_at_once_are_found_by_little_s_law():
    prediction = predicted(server(), clients=64)
    result = as_result(prediction)
    for metric in ("output_throughput", "request_throughput"):
        result[metric] /= 6
    said = explain(prediction, result)
    assert len(said) == 1
    assert said[0].startswith("Batch: by Little's law")


def test_a_cache_that_is_too_small_is_the_knob_to_turn():
    crowded = predicted(server("Qwen3-14B", "A100-40", gpu_memory_utilization=0.85), rate=50)
    flags = [knob.flag for knob in crowded.knobs()]
    assert crowded.advice().startswith(f"Turn {flags[0]} first")
    assert "Turn nothing" in predicted(server(), rate=0.5).advice()
