"""The fit of the workload's constants: what it sees, and that runs timed anew are runs."""

import pytest

from minivllm_lab.workload.published import ASIDE, published_rows
from minivllm_lab.workload.server import CONSTANTS, GENERATIONS, Constants


def test_the_fit_sees_no_row_that_is_kept_aside(bench):
    assert bench.ROWS
    assert {row.source.role for row in bench.ROWS} == {"calibration"}
    assert len(bench.ROWS) + sum(row.source.role == ASIDE for row in published_rows()) == len(published_rows())


def test_a_run_timed_anew_equals_a_run_of_its_own(bench):
    row = next(row for row in bench.ROWS if row.load == "c4 x32")
    slower = Constants(memory=0.4)
    assert bench.retimed(row, slower, GENERATIONS) == pytest.approx(row.modelled(slower), rel=1e-9)
    assert row.modelled(slower) > 1.5 * row.modelled(CONSTANTS)
