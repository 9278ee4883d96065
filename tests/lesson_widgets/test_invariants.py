"""What holds in any widget that shows both figures: output tokens a second × the gap between tokens ≤ seats.

A request holds its seat during the gaps between its tokens, so the product is the number of requests that decode at an
average moment. The widgets of lessons 05b and 06 show both; that of 05b is held to it in `test_optimization_catalog`.
"""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minivllm.simulate.layouts import Layout
from widgets import serving_runs as runs

LAYOUTS = st.builds(Layout, st.sampled_from((1, 2, 4)), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)))
WORK = st.builds(runs.Work, st.sampled_from((16, 64, 256, 1024)), st.sampled_from((2, 4, 16, 64)))
BALANCE = 0.9
"""Answers per request that comes. Below it a run fills up: its rate is of all of it, and its gaps of what came late."""


@given(st.sampled_from(("H100", "A100", "L4")), LAYOUTS, WORK, st.sampled_from(runs.RATES))
@settings(max_examples=25, deadline=None)
def test_serving_has_no_more_requests_that_decode_than_seats(gpu, layout, work, rate):
    experiment = runs.experiment("Llama-3.1-8B", gpu, layout, work)
    assume(not experiment.refused)
    for _ in experiment.run(rate):
        pass
    point = experiment.runs.found[rate]
    assume(point.requests_per_second >= BALANCE * rate)
    assert point.tokens_per_second * point.tpot[0] <= layout.groups * experiment._placed.places
