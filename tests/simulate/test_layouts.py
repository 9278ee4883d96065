"""Layouts and open loads: stretches give what single steps give, and means agree with queueing
theory.
"""

import statistics
from dataclasses import replace

import pytest
from refusals import assert_refused

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.memory import kv_bytes_per_token
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.layouts import BLOCK_SIZE, Layout, PlacedModel
from minivllm_simulate.memory import weight_bytes
from minivllm_simulate.open_load import OpenLoad, OpenRun, Stay, finished, run_open
from minivllm_simulate.simulated_engine import GENERATED
from minivllm_simulate.virtual_clock import SimulatedRequest, percentile, simulate, to_request
from minivllm_simulate.workloads import RequestLengths, gamma_arrivals, poisson_arrivals

MODEL, LARGE, H100 = known_model("Llama-3.1-8B"), known_model("Meta-Llama-3-70B"), get_hardware("H100")
ONE = PlacedModel(MODEL, H100, Layout(1, 1, 1))
ROOM = 240 * (256 + 64 + 2 * BLOCK_SIZE)
"""Tokens of all the requests that come in a test."""


def served(
    rate: float,
    prompt: int = 256,
    output: int = 64,
    *,
    counted: int = 120,
    at_start: int = 0,
    placed: PlacedModel = ONE,
) -> OpenRun:
    arrivals = gamma_arrivals(rate, 2 * counted, seed=3)
    load = OpenLoad([RequestLengths(prompt, output)] * 2 * counted, arrivals, counted, at_start)
    return result(load, placed)


def result(load: OpenLoad, placed: PlacedModel = ONE) -> OpenRun:
    longest = max(lengths.total for lengths in load.lengths)
    configs = placed.configs((longest + 2 * BLOCK_SIZE) * (len(load.lengths) + load.at_start))
    return finished(run_open(load, *configs, placed.cost))


# ---- stretches


@pytest.mark.parametrize("rate", [2.0, 30.0, 90.0])
def test_stretches_give_what_single_steps_give(rate: float):
    run = served(rate)
    work = [SimulatedRequest(256, 64, at) for at in gamma_arrivals(rate, 240, seed=3)]
    exact = simulate(work, Scheduler(*ONE.configs(ROOM)), ONE.cost).requests[:120]
    assert run.ttfts == pytest.approx(sorted(request.ttft for request in exact), rel=0.02, abs=1e-4)
    assert run.tpots == pytest.approx(sorted(request.tpot for request in exact), rel=0.01)
    assert all(stay.ended and stay.tokens == 64 for stay in run.stays)


def test_a_prompt_that_is_cut_gives_its_first_token_when_its_last_piece_is_computed():
    """A prompt's single leftover token looks like a decode, but is not one."""
    lengths = [RequestLengths(64, 500), RequestLengths(2048, 64), RequestLengths(1, 1)]
    run = result(OpenLoad(lengths, [0.0, 0.1, 100.0], 2, 0))
    assert run.stays[1].first - 0.1 < 0.1


def test_who_has_no_token_yet_has_waited_until_the_end_and_time_per_token_needs_two():
    ended = Stay(0.0, 3, first=0.25, last=1.25, tokens=3, ended=True)
    run = OpenRun([Stay(1.0, 3), Stay(1.0, 3, first=1.5, last=1.5, tokens=1), ended], end=4.0)
    assert [run.ttft(stay) for stay in run.stays] == [3.0, 0.5, 0.25]
    assert run.ttfts == [0.25, 0.5, 3.0]
    assert run.tpots == [0.5]


# ---- queueing theory


@pytest.mark.parametrize("rate", [5.0, 30.0, 80.0])
def test_littles_law_holds_and_the_mean_step_is_what_the_scheduler_comes_to(rate: float):
    """Requests inside = rate × time that each stays, where as many leave as arrive."""
    steady = ONE.steady(256, 64, ONE.kv_tokens())
    batch = steady.batch(rate)
    assert steady.rate(batch) == pytest.approx(rate, rel=0.01)
    run = served(rate, at_start=round(batch))
    inside, stay = run.request_seconds / run.end, statistics.mean(stay.last - stay.arrival for stay in run.stays)
    assert inside == pytest.approx(run.come / run.end * stay, rel=0.12)
    assert inside == pytest.approx(batch, rel=0.2, abs=1.5)
    assert statistics.median(run.tpots) == pytest.approx(steady.step_seconds(batch), rel=0.1)


@pytest.mark.parametrize("prompt", [64, 512, 2048])
@pytest.mark.parametrize("tp", [1, 4])
def test_more_than_the_mean_work_allows_makes_the_queue_grow_and_less_does_not(prompt: int, tp: int):
    placed = replace(ONE, layout=Layout(tp, 1, 1))
    steady = placed.steady(prompt, 64, placed.kv_tokens())
    for share, grows in ((0.7, False), (1.3, True)):
        rate = share * steady.capacity()
        run = served(rate, prompt, at_start=round(steady.batch(rate)), placed=placed)
        assert (run.queue > 0.05 * run.come) is grows, (share, run.queue, run.come)


def test_at_low_load_a_first_token_waits_as_in_an_m_d_1_queue():
    """An answer of one token is served alone, after a mean wait of rho × s / (2 × (1 - rho)) if a
    step takes one prompt.
    """
    prompt, rho = 2048, 0.3
    service = ONE.cost.seconds(StepShape.of([(prompt, 0)]))
    run = served(rho / service, prompt, 1, counted=2000)
    waits = [stay.first - stay.arrival - service for stay in run.stays]
    assert statistics.mean(waits) == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.15)


def test_beginning_in_the_middle_of_things_saves_the_time_to_fill_up():
    """Early requests of a short run would otherwise find an emptier engine than later ones."""
    steady = ONE.steady(64, 256, ONE.kv_tokens())
    rate = 0.6 * steady.capacity()
    empty, full = (served(rate, 64, 256, at_start=n) for n in (0, round(steady.batch(rate))))
    expected = steady.batch(rate)
    assert full.request_seconds / full.end == pytest.approx(expected, rel=0.1)
    assert empty.request_seconds / empty.end < 0.8 * expected


# ---- layouts


def test_what_does_not_fit_says_how_many_bytes_it_wants():
    what_fits = r"weights take 131\.4 GiB of each GPU, of which 72\.8 may be used"
    assert_refused(what_fits, PlacedModel(LARGE, H100, Layout(1, 1, 8)).kv_tokens)
    assert weight_bytes(LARGE, "auto") / 2**30 == pytest.approx(131.4, abs=0.1)
    room = [PlacedModel(LARGE, H100, Layout(*item)).kv_tokens() for item in ((2, 1, 1), (4, 1, 1), (8, 1, 1))]
    assert room == sorted(room)
    freed = weight_bytes(LARGE, "auto", 4) - weight_bytes(LARGE, "auto", 8)
    assert room[2] - 2 * room[1] == pytest.approx(freed / kv_bytes_per_token(LARGE, "auto", 8), rel=0.05)


def test_stages_divide_the_weights_as_tensor_parallel_does_and_batches_share_the_room():
    stages, cut = (PlacedModel(LARGE, H100, Layout(*item)) for item in ((1, 4, 1), (4, 1, 1)))
    assert stages.kv_tokens() * 4 == pytest.approx(cut.kv_tokens(), rel=0.1)
    one = StepShape.of([(1, 500)])
    assert stages.cost.seconds(one) > 3 * cut.cost.seconds(one)
    handovers = stages.cost.seconds(one) - stages.cost.step.seconds(one)
    assert handovers == pytest.approx(3 * (1e-5 + 2 * LARGE.hidden_size / stages.cost.step.link))


def test_a_layout_in_words():
    assert str(Layout(2, 1, 4)) == "TP 2 × DP 4"
    assert str(Layout(2, 4, 1)) == "TP 2 × PP 4 × DP 1"
    assert (Layout(2, 4, 3).gpus, Layout(2, 4, 3).groups) == (24, 12)


# ---- replicas


class Replica:
    """An engine that is stepped up to a given time."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.scheduler, self.now, self.tokens = Scheduler(config, cache), 0.0, {}

    def load(self) -> int:
        """Return the load by vLLM's rule: requests go where it is least."""
        return 4 * len(self.scheduler.waiting) + len(self.scheduler.running)

    def run_to(self, time: float) -> None:
        while self.now < time and self.scheduler.has_unfinished_requests():
            output, live = self.scheduler.schedule(), self.scheduler.requests
            counts = output.num_scheduled_tokens
            self.now += ONE.cost.seconds(StepShape.of((n, live[k].num_computed_tokens - n) for k, n in counts.items()))
            done = {k: [GENERATED] for k in counts if live[k].num_computed_tokens >= live[k].num_tokens}
            self.scheduler.update_from_output(output, ModelRunnerOutput(done))
            for key in done:
                self.tokens.setdefault(int(key), []).append(self.now)
        self.now = max(self.now, time)


@pytest.mark.parametrize("rate", [20.0, 120.0])
def test_dealing_in_turn_is_what_vllms_rule_comes_to_where_requests_are_alike(rate: float):
    count, groups = 240, 4
    arrivals, replicas = poisson_arrivals(rate, count), [Replica(*ONE.configs(ROOM)) for _ in range(groups)]
    for index, at in enumerate(arrivals):
        for replica in replicas:
            replica.run_to(at)
        request = to_request(index, SimulatedRequest(256, 64, at), at)
        min(replicas, key=Replica.load).scheduler.add_request(request)
    for replica in replicas:
        replica.run_to(1e6)
    times = {key: moments for replica in replicas for key, moments in replica.tokens.items() if key >= count // 4}
    ttfts = [moments[0] - arrivals[key] for key, moments in times.items()]
    tpots = [(moments[-1] - moments[0]) / 63 for moments in times.values()]

    in_turn = gamma_arrivals(rate / groups, count, burstiness=groups)
    mine = result(OpenLoad([RequestLengths(256, 64)] * count, in_turn, 120, 0))
    assert percentile(mine.tpots, 0.5) == pytest.approx(percentile(tpots, 0.5), rel=0.05)
    assert percentile(mine.tpots, 0.99) == pytest.approx(percentile(tpots, 0.99), rel=0.05)
    assert percentile(mine.ttfts, 0.5) == pytest.approx(percentile(ttfts, 0.5), rel=0.2)
    assert percentile(mine.ttfts, 0.99) == pytest.approx(percentile(ttfts, 0.99), rel=0.3)
