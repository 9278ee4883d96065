"""What holds in any widget that shows both figures: output tokens a second × the gap between tokens ≤ seats.

A request holds its seat during the gaps between its tokens, so the product is the number of requests that decode at an
average moment. The widgets of lessons 05b and 06 show both; that of 05b is held to it in `test_optimization_catalog`.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.simulate.layouts import Layout
from widgets import serving_runs as runs
from widgets.serving_state import MOST_WAITING

LAYOUTS = st.builds(Layout, st.sampled_from((1, 2, 4)), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)))
WORK = st.builds(runs.Work, st.sampled_from((16, 64, 256, 1024)), st.sampled_from((2, 4, 16, 64)))
TRANSIENT = 1.25
"""In overload the rate is of the whole run, which fills up, and the gap of requests that came when it was full."""


@given(st.sampled_from(("H100", "A100", "L4")), LAYOUTS, WORK, st.sampled_from((*runs.RATES, 2000.0)))
@settings(max_examples=25, deadline=None)
def test_serving_has_no_more_requests_that_decode_than_seats(gpu, layout, work, rate):
    experiment = runs.experiment("Llama-3.1-8B", gpu, layout, work)
    if experiment.refused:
        return
    for _ in experiment.run(rate):
        pass
    point = experiment.runs.found[rate]
    decoding = point.tokens_per_second * point.tpot[0]
    seats = layout.groups * experiment._placed.places
    if point.waiting <= MOST_WAITING:
        assert decoding <= min(seats, point.inside * 1.01)
    else:
        assert decoding <= seats * TRANSIENT
