"""Pages that are partly generated, and records that are read back."""

import pytest
from refusals import assert_refused

from minivllm_lab.marks import put_between_marks
from minivllm_lab.results import read_record, record, write_record

PAGE = "before\n<!-- claims:03 -->\nold\nlines\n<!-- /claims -->\nafter\n"


def test_only_what_is_between_the_marks_changes():
    changed = put_between_marks(PAGE, "claims:03", "new")
    assert changed == "before\n<!-- claims:03 -->\nnew\n<!-- /claims -->\nafter\n"
    assert put_between_marks(changed, "claims:03", "old\nlines") == PAGE


@pytest.mark.parametrize("page", ["", PAGE.replace("03", "04"), PAGE + PAGE, PAGE.replace("/claims", "/claim")])
def test_a_page_without_one_place_is_refused(page):
    assert_refused("<!-- claims:03 -->", put_between_marks, page, "claims:03", "new")


def test_a_record_is_read_as_it_was_written(tmp_path):
    result = record("speed", {"a": 1.5}, rounds=3)
    write_record(tmp_path / "new" / "speed.json", result)
    assert read_record(tmp_path / "new" / "speed.json", "speed") == result


@pytest.mark.parametrize("text", [None, "{", "[]", '{"name": "size"}'])
def test_what_is_no_such_record_is_refused(tmp_path, text):
    path = tmp_path / "speed.json"
    if text is not None:
        path.write_text(text)
    assert_refused("speed", read_record, path, "speed")
