"""Notebooks are built from lessons byte for byte, and every kind of mistake in a lesson is
reported.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from refusals import assert_refused
from repository import ROOT

from minivllm.errors import MinivllmError
from minivllm_lab.exercise import load

notebooks = load(ROOT / "tools" / "notebooks.py")

SCRIPT = '''"""A script."""
# region: imports
import math
# endregion

# region: area
def area(radius):
    # region: formula
    return math.pi * radius**2
    # endregion
# endregion
'''
LESSON = """\
# 07 Circles

Promise, see [the script](../vllm/07_circles.py#L3) and [break it](#break-it-when-r--0).

```python script=vllm/07_circles.py region=formula
return math.pi * radius**2
```

## Run it

```python exec script=vllm/07_circles.py region=imports
import math
```

```python exec script=vllm/07_circles.py region=area
def area(radius):
    return math.pi * radius**2
```
```python exec
area(1.0)
```

![figure](figures/circle.svg) `[not](a link)` [next](08_spheres.md) <img src="figures/x.png">

```bash
uv run python vllm/07_circles.py
```

<details><summary>Answer</summary>

Not a cell of its own

```text
# plain
```

</details>

## Break it when `r` < 0

```python exercise
def area(radius):
    raise NotImplementedError("write it")
```

"""
CHECK = """\
```python check
from minivllm_lab.exercise import check_here

check_here("07", mine)
```
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a small repository with one lesson and its script; nothing is built yet."""
    for name, text in {"vllm/07_circles.py": SCRIPT, "lessons/07_circles.md": LESSON + CHECK}.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
    return tmp_path


def lesson(root: Path) -> Path:
    return root / "lessons" / "07_circles.md"


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def cells(root: Path) -> list[nbformat.NotebookNode]:
    notebooks.write(root, [])
    return nbformat.read(root / "notebooks" / "07_circles.ipynb", as_version=4).cells


def prose(root: Path) -> str:
    return "\n".join(cell.source for cell in cells(root) if cell.cell_type == "markdown")


def test_what_is_written_agrees_and_is_the_same_again(root: Path):
    assert notebooks.write(root, []) == ["notebooks/07_circles.ipynb", "notebooks/README.md"]
    first = (root / "notebooks" / "07_circles.ipynb").read_bytes()
    assert lesson(root).read_text() == LESSON + CHECK, "a fresh lesson is left as it is"
    assert notebooks.drift(root, []) == []
    assert notebooks.write(root, []) == []
    (root / "notebooks" / "07_circles.ipynb").unlink()
    notebooks.write(root, [])
    assert (root / "notebooks" / "07_circles.ipynb").read_bytes() == first


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[a](https://x.org/y.md) <https://x.org>", "[a](https://x.org/y.md) <https://x.org>"),
        ("[a](mailto:x@y.z) [b](/root)", "[a](mailto:x@y.z) [b](/root)"),
        ('[a](../README.md "title") [b](exercises/07.py)', '[a](../README.md "title") [b](../lessons/exercises/07.py)'),
        ("[a]: figures/a.svg", "[a]: ../lessons/figures/a.svg"),
        ("[^1]: Words of a footnote.", "[^1]: Words of a footnote."),
        ("[![b](figures/b.svg)](../vllm/07.py)", "[![b](../lessons/figures/b.svg)](../vllm/07.py)"),
        ("`` [a](b.md) ` `` [c](02_d.md#e)", "`` [a](b.md) ` `` [c](02_d.ipynb#e)"),
    ],
)
def test_each_kind_of_link(root: Path, line: str, expected: str):
    change(lesson(root), "Promise", f"\n{line}\n\nPromise")
    assert expected in prose(root).split("\n")


def test_in_colab_the_first_cell_gets_the_course(root: Path, monkeypatch):
    asked = []
    run = {"run_line_magic": lambda *words: asked.append(" ".join(words))}
    shell = SimpleNamespace(system=asked.append, register_magic_function=print, **run)
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("colab"))
    first = next(cell.source for cell in cells(root) if cell.cell_type == "code")
    exec(TransformerManager().transform_cell(first), {"get_ipython": lambda: shell})
    assert asked == [
        f"[ -d /content/course ] || git clone --quiet --depth 1 {notebooks.ADDRESS.address()} /content/course",
        "run /content/course/tools/colab.py",
    ]
    assert (ROOT / "tools" / "colab.py").is_file()


def test_a_change_in_the_script_is_noticed_and_mended(root: Path):
    notebooks.write(root, [])
    change(root / "vllm" / "07_circles.py", "radius**2\n    # end", "radius * radius\n    # end")
    result = notebooks.drift(root, [])
    assert result[0].startswith("lessons/07_circles.md quotes code that its script")
    assert result[1] == "notebooks/07_circles.ipynb differs from 07_circles.md"
    assert notebooks.write(root, []) == ["lessons/07_circles.md", "notebooks/07_circles.ipynb"]
    assert notebooks.drift(root, []) == []
    assert "radius * radius" in lesson(root).read_text()


def test_a_notebook_edited_missing_or_left_behind_is_noticed(root: Path):
    notebooks.write(root, [])
    path = root / "notebooks" / "07_circles.ipynb"
    change(path, "area(1.0)", "area(3.0)")
    assert notebooks.drift(root, []) == ["notebooks/07_circles.ipynb differs from 07_circles.md"]
    path.rename(path.with_name("06_squares.ipynb"))
    missing, left = notebooks.drift(root, [])
    assert missing == "notebooks/07_circles.ipynb is missing"
    assert left == "notebooks/06_squares.ipynb has no lesson: delete it"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("```python exec\narea", "```python exce\narea", "'exce' is not understood"),
        ("```python exec\narea", "```python exec check\narea", "'exec check' is not understood"),
        ("```bash", "```bash exec", "a cell is a `python` fence"),
        ("```python exec\narea", "  ```python exec\narea", "a cell is a `python` fence"),
        ("Not a cell of its own", "### Not a cell of its own", "a heading starts a cell, which <details> cannot hold"),
        ("```text\n# plain", "```python exec\n# plain", "a cell cannot stand inside <details>"),
        ("region=area\ndef", "region=volume\ndef", ".* 0 regions 'volume', .*its regions: imports, area, formula"),
        ("script=vllm/07_circles.py region=area", "script=vllm/no.py", "there is no file vllm/no.py"),
        ("script=vllm/07_circles.py region=area", "region=area", "region=area needs script=FILE"),
        (CHECK, CHECK.removesuffix("```\n"), "this fence is never closed"),
    ],
)
def test_what_is_wrong_in_a_lesson_is_named_with_its_line(root: Path, old: str, new: str, message: str):
    change(lesson(root), old, new)
    line = lesson(root).read_text().partition(new)[0].count("\n") + 1
    assert_refused(f"^lessons/07_circles.md:{line}: {message}", notebooks.write, root, [])


def test_a_region_must_end_and_be_the_only_one(root: Path):
    script = root / "vllm" / "07_circles.py"
    change(script, "# endregion\n\n", "\n")
    assert_refused(r"imports.*# endregion", notebooks.write, root, [])
    script.write_text(SCRIPT + SCRIPT)
    assert_refused(r"\b2\b.*formula", notebooks.write, root, [])


def test_a_whole_file_can_be_quoted(root: Path):
    change(lesson(root), "```python exec\narea(1.0)", "```python exec script=vllm/07_circles.py\nold")
    whole = next(cell.source for cell in cells(root) if "A script" in cell.source)
    assert "region" not in whole
    assert whole.startswith('"""A script."""')


WIDGET = """\
![what it draws](figures/circle.svg)

```python exec
from widgets import circles

circles.show()
```
"""


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (WIDGET, 0),
        ("\n".join([*reversed(WIDGET.split("\n\n", 1))]), 0),  # the picture after the cell
        (WIDGET.replace(")\n", ")\n\nOther words.\n"), 1),
        (WIDGET.replace("circles.show()", "circles.frames()"), 1),
        (WIDGET.replace("```python exec", "```python"), 1),
    ],
)
def test_a_picture_beside_the_widget_that_draws_it_is_left_out(root: Path, text: str, kept: int):
    change(lesson(root), "Promise", f"{text}\nPromise")
    assert prose(root).count("![what it draws]") == kept
    assert "![what it draws]" in lesson(root).read_text(), "the lesson keeps it: no widget is live there"


def test_the_list_of_notebooks_has_titles_questions_and_minutes(root: Path):
    header = "**Time:** 2 minutes of talk, 3 of exercise; alone, about 70. **You need:** nothing"
    change(lesson(root), "Promise", header)
    (root / "README.md").write_text("| 07 | [Circles](lessons/07_circles.md) | How round? | `run` |\n")
    notebooks.write(root, [])
    page = (root / "notebooks" / "README.md").read_text()
    assert "| 07 | [Circles](07_circles.ipynb) | How round? | 70 |\n" in page
    change(root / "README.md", "How round?", "How big?")
    assert notebooks.drift(root, []) == ["notebooks/README.md differs from the lessons"]
    assert notebooks.drift(root, ["07"]) == [], "it belongs to all lessons together"


def test_a_published_repository_has_buttons_for_colab(root: Path, monkeypatch):
    monkeypatch.setattr(notebooks.ADDRESS, "UNPUBLISHED", "nobody")
    notebooks.write(root, [])
    address = notebooks.ADDRESS.colab("07_circles")
    assert address.startswith("https://colab.")
    assert f"]({address})" in cells(root)[0].source
    page = (root / "notebooks" / "README.md").read_text()
    assert "| minutes, alone | without set-up |\n| --- | --- | --- | ---: | --- |" in page
    assert f"| [in Colab]({address}) |" in page


def test_an_unknown_number_lists_the_lessons(root: Path):
    assert_refused(r"09.*07", notebooks.write, root, ["9"])
    assert notebooks.write(root, ["7"]) == ["notebooks/07_circles.ipynb"]


def test_executing_gives_seconds_and_names_a_demo_that_cannot_run_again(root: Path, monkeypatch: pytest.MonkeyPatch):
    without_torch = "import sys\n\nsys.modules['torch'] = sys\n"  # loading it would take most of the time
    monkeypatch.setattr(notebooks, "SETUP", without_torch + notebooks.SETUP)
    change(lesson(root), CHECK, "")
    change(lesson(root), "area(1.0)\n", "once = globals().get('once', 0) + 1\nassert once < 2\n")
    notebooks.write(root, [])
    path = root / "notebooks" / "07_circles.ipynb"
    before = path.read_bytes()
    assert notebooks.execute(path) > 0
    assert path.read_bytes() == before
    with pytest.raises(MinivllmError, match=r"(?s)07_circles.ipynb.*assert once < 2.*AssertionError"):
        notebooks.execute(path, again=True)
