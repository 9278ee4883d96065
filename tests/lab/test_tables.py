"""Tables in Markdown."""

from minivllm.lab.tables import markdown_table

COLUMNS = ("engine", "tokens/s", "alone")


def test_numbers_are_aligned_to_the_right_and_words_to_the_left():
    rows = [("ours", 5823, "419"), ("theirs", 5147, "534")]
    lines = ["| ours | 5823 | 419 |", "| theirs | 5147 | 534 |"]
    head = "| engine | tokens/s | alone |"
    assert markdown_table(COLUMNS, rows).split("\n") == [head, "| --- | ---: | ---: |", *lines]
    assert markdown_table(COLUMNS, iter(rows), words=True).split("\n") == [head, "| --- | --- | --- |", *lines]


def test_without_rows_only_the_head_is_left():
    assert markdown_table(COLUMNS[:1], []) == "| engine |\n| --- |"
