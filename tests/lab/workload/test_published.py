"""The published rows: sources, what is kept aside, and the figures and tables that are made of them."""

import pytest

from minivllm_lab.workload.published import ASIDE, KINDS, known_error, modelled_figures, published_rows
from minivllm_lab.workload.report import BEGIN, END, PAGE, page_tables
from minivllm_lab.workload.server import minor_version

ROWS = published_rows()
QUICK = [row for row in ROWS if row.kind == "knee" or len(row.requests.requests) <= 64]


def test_every_row_has_a_source_and_no_source_is_on_both_sides():
    sources = {row.source for row in ROWS}
    assert len({source.name for source in sources}) == len(sources)
    assert {source.role for source in sources} == {ASIDE, "calibration"}
    for source in sources:
        assert source.address.startswith("https://")
        assert source.where
        assert source.date
        assert minor_version(source.vllm)
    by_place = {(source.address, source.where, source.gpu): source for source in sources}
    assert len(by_place) == len(sources), "one table is cited twice"


def test_what_is_kept_aside_covers_the_kinds_the_gpus_and_the_releases():
    aside = [row for row in ROWS if row.source.role == ASIDE]
    assert len(aside) >= 60
    assert {row.kind for row in aside} == set(KINDS)
    assert {row.source.gpu for row in aside} == {"A100-40", "A100-80", "H100", "H200", "L4"}
    assert {row.server().host.name for row in aside} == {row.server().host.name for row in ROWS}


def test_the_modelled_figures_are_those_of_today():
    assert set(modelled_figures()) == {row.key for row in ROWS}
    assert len(ROWS) == len({row.key for row in ROWS})
    assert len(QUICK) > 40
    for row in QUICK:
        assert row.modelled() == pytest.approx(modelled_figures()[row.key], rel=1e-3), row.key


def test_a_range_counts_from_its_nearer_end():
    knee = next(row for row in ROWS if row.value == [5, 25])
    assert [knee.error(load) for load in (4, 5, 12, 25, 50)] == pytest.approx([-0.2, 0, 0, 0, 1])


def test_the_page_has_the_tables_as_they_are():
    text = PAGE.read_text()
    assert BEGIN + page_tables() + END in text, "run: python -m minivllm_lab.workload --errors --write"


def test_an_error_is_of_rows_kept_aside_alone():
    decodes = [row for row in ROWS if row.kind == "decode"]
    off = sorted(abs(row.error(modelled_figures()[row.key])) for row in decodes if row.source.role == ASIDE)
    assert known_error("decode").rows == len(off) < len(decodes)
    assert off[0] < known_error("decode").median <= known_error("decode").worst == off[-1]
