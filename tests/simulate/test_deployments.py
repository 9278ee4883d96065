"""TP, PP and DP: what they send and keep is what formulas say, and the knee is found where it
really is.
"""

import pytest
from refusals import assert_refused

from minivllm.memory import kv_bytes_per_token
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.deployments import WAYS, bytes_sent, deployment, find_knee, serve
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import weight_bytes

LLAMA, H100 = known_model("Llama-3.1-8B"), get_hardware("H100")


def test_bytes_of_a_step():
    """Llama-3.1-8B has 32 layers, hidden size 4,096 and 16 bits."""
    assert bytes_sent("TP", 2, 1, 4096, 32) == 2 * 32 * 4096 * 2
    assert bytes_sent("TP", 4, 64, 4096, 32) == 64 * 2 * 32 * 1.5 * 4096 * 2
    assert bytes_sent("PP", 4, 64, 4096, 32) == 64 * 4096 * 2
    assert [bytes_sent(way, 1, 64, 4096, 32) for way in WAYS] == [0, 0, 0]
    assert bytes_sent("DP", 8, 64, 4096, 32) == 0


def test_one_gpu_is_the_same_in_every_way():
    shape = StepShape.of([(1, 500)] * 8)
    assert len({deployment(LLAMA, H100, way, 1).cost.seconds(shape) for way in WAYS}) == 1


def test_what_is_left_for_the_cache():
    """Copies of the weights take memory from the cache: DP has three copies' worth of tokens less
    than PP.
    """
    placed = {way: deployment(LLAMA, H100, way, 4) for way in WAYS}
    four = {way: each.kv_tokens() * each.layout.groups for way, each in placed.items()}
    copies = 3 * weight_bytes(LLAMA, "auto") / kv_bytes_per_token(LLAMA)
    assert four["PP"] - four["DP"] == pytest.approx(copies, rel=0.02)
    assert four["TP"] == pytest.approx(four["PP"], rel=0.05)


def test_only_tensor_parallelism_makes_a_lone_token_faster():
    alone = {way: serve(deployment(LLAMA, H100, way, 4), 0.01, 12).tpots[0] for way in WAYS}
    assert alone["TP"] < alone["DP"] / 2
    assert alone["DP"] < alone["PP"] < 1.05 * alone["DP"], "a pipeline has hand-overs besides"


def test_a_tight_service_level_calls_for_tp_and_a_loose_one_for_dp():
    """This also holds for another draw of the requests than the lesson's, which moves the knees."""
    tp, dp = (deployment(LLAMA, H100, way, 4) for way in ("TP", "DP"))
    met = {rate: [serve(item, rate, 60, seed=1) for item in (tp, dp)] for rate in (115, 165)}
    assert [run.attainment(0.5, 0.0075) >= 0.9 for run in met[115]] == [True, False]
    assert [run.attainment(0.5, 0.010) >= 0.9 for run in met[165]] == [False, True]


def test_engines_share_the_load():
    """Four engines at four times the rate are one engine, four times."""
    first, four = deployment(LLAMA, H100, "DP", 1), deployment(LLAMA, H100, "DP", 4)
    alone, together = serve(first, 15, 30), serve(four, 60, 30)
    assert together == alone


def test_attainment_counts_requests_that_met_both():
    served = serve(deployment(LLAMA, H100, "TP", 2), 20, 24)
    assert served.attainment(10, 10) == 1
    assert served.attainment(10, 0) == served.attainment(0, 10) == 0
    middle = served.ttfts[12]
    assert 0.4 < served.attainment(middle, 10) < 0.65


def test_a_model_that_does_not_fit_is_refused():
    large = known_model("Meta-Llama-3-70B")
    assert_refused(r"weights take 131\.4 GiB of each GPU", deployment(large, H100, "DP", 4).kv_tokens)
    assert deployment(large, H100, "PP", 4).kv_tokens() > 25_000


@pytest.mark.parametrize(("true", "knee"), [(27, 26.25), (100, 40), (5, 0)])
def test_the_knee_by_hand(true, knee):
    """The bisection between 20 and 40, with a knee at 27, tries 30, 25, 27.5 and 26.25, as the
    lesson says.
    """
    tried = []

    def attainment(rate):
        tried.append(rate)
        return 1.0 if rate <= true else 0.5

    assert find_knee(attainment, 20, 40, 4) == knee
    if true == 27:
        assert tried == [20, 40, 30, 25, 27.5, 26.25]
