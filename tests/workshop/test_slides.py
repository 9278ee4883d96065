"""The workshop's slides as text: their order, their notes, their figures, commands, numbers and
words.
"""

import json
import re
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import slides
import words
from refusals import assert_refused
from repository import LESSONS, ROOT, lesson

DECKS = [pytest.param(deck, id=deck.path.stem[:2]) for deck in slides.decks(ROOT)]
PARTS = ("Bet", "Reveal", "Demo", "In vLLM", "On call", "Break it", "Exercise", "Cheat sheet")
MOST_WORDS = 40
MOST_SAID = 90  # words: what can be said in the minute that the guides' plans give to a slide
CODE = re.compile(r"`[^`]+`|^```bash.*?^```", re.DOTALL | re.MULTILINE)
MAKE = re.compile(r"\bmake ([a-z-]+)((?: [A-Z]+=\w+)*)")
SCRIPT = re.compile(r"\buv run python ((?:vllm|tools|benchmarks)/\S+\.py)((?: --[\w-]+(?: \w+)?)*)")
each_deck = pytest.mark.parametrize("deck", DECKS)


def test_every_lesson_has_slides():
    assert [deck.path.stem for deck in slides.decks(ROOT)] == LESSONS


@each_deck
def test_a_deck_has_twelve_to_twenty_slides_with_a_title_each(deck: slides.Deck):
    assert 12 <= len(deck.slides) <= 20
    titles = [slide.title for slide in deck.slides]
    assert titles[0] == lesson(deck.path.stem).splitlines()[0].removeprefix("# ")
    assert all(titles)
    assert len(set(titles)) == len(titles), "two slides have one title"


@each_deck
def test_a_deck_has_every_part_and_a_bet_is_followed_by_its_reveal(deck: slides.Deck):
    titles = [slide.title for slide in deck.slides]
    for part in PARTS:
        assert any(title.startswith(part) for title in titles), f"no slide begins with {part!r}"
    after = [second.partition(":")[0] for first, second in pairwise(titles) if first.startswith("Bet")]
    assert set(after) == {"Reveal"}
    assert titles[-1] == "Cheat sheet"
    demo = next(slide for slide in deck.slides if slide.title.startswith("Demo"))
    assert demo.commands, "the demo shows no command"
    assert "\n**If it fails,** " in demo.notes, "the notes of the demo do not say what to do if it fails"


@each_deck
def test_a_slide_has_few_words_and_notes_with_something_to_say_and_a_question_with_its_answer(deck: slides.Deck):
    for slide in deck.slides:
        assert slide.notes.startswith("**Say.** "), f"{slide.title}: what do I say?"
        question = re.search(r"\*\*Asked:\*\* \*[^*]+[?.]\*\s+\S", slide.notes)
        assert question, f"{slide.title}: what will be asked, and what is the answer?"
        said = slide.notes.split("**Asked:**")[0].split("**If it fails,**")[0]
        assert words.count(said) <= MOST_SAID, f"{slide.title}: too much to say in a minute"
        assert words.count(slides.HEADING.sub("", slide.body)) <= MOST_WORDS, f"{slide.title}: too many words"


@each_deck
def test_a_deck_shows_a_formula_and_the_lessons_widget(deck: slides.Deck):
    text = "\n".join(slide.body for slide in deck.slides)
    assert re.search(r"^[^|>`!-]* [=≈] |^2 × layers", text, re.MULTILINE), "no line of a slide is a formula"
    widgets = re.findall(r"^!\[The widget: [^\]]*\]\((figures/\w+\.svg)\)", lesson(deck.path.stem), re.MULTILINE)
    assert any(f"](../../lessons/{figure})" in text for figure in widgets), f"none of {widgets}"


@each_deck
def test_every_picture_is_a_step_or_a_still_of_the_lessons_own_figures(deck: slides.Deck, tmp_path: Path):
    pictures = [picture for slide in deck.slides for picture in slide.pictures]
    assert len(pictures) >= 4, "the lesson's figures are not used"
    for text, name, step in pictures:
        figure = (deck.path.parent / name).resolve()
        assert figure.parent == ROOT / "lessons" / "figures"
        assert figure.name.startswith(deck.path.stem[:2]), f"{figure.name} is another lesson's"
        assert step or "opening" not in name, f"{figure.name} moves: name a step, as in {figure.name}#1"
        assert len(text.split()) >= 4, f"{figure.name}: say in words what is to be seen"
        assert slides.copied(figure, step, tmp_path)


@each_deck
def test_every_command_exists(deck: slides.Deck):
    assert_commands_exist("\n".join(CODE.findall(deck.path.read_text())), deck.path.stem[:2])


def assert_commands_exist(text: str, number: str) -> None:
    """Expect the targets of `make`, scripts, flags and modules in commands of this lesson to be there."""
    makefile = (ROOT / "Makefile").read_text()
    for target, variables in MAKE.findall(text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target} does not exist"
        for name, value in (pair.split("=") for pair in variables.split()):
            assert f"$({name})" in makefile or f"$(if $({name})" in makefile, f"make knows no {name}"
            check_value(name, value, number)
    for path, flags in SCRIPT.findall(text):
        assert (ROOT / path).is_file()
        assert all(known_flag(ROOT / path, flag) for flag in re.findall(r"--[\w-]+", flags)), f"{path}{flags}"
    for module in re.findall(r"-m minivllm_lab\.(\w+)", text):
        place = ROOT / "vllm" / "minivllm_lab" / module
        assert place.with_suffix(".py").is_file() or place.is_dir(), module


def check_value(name: str, value: str, number: str) -> None:
    """Check a variable of `make`: the lesson's own number, its bug, a function, a stop of the tour."""
    lessons = ROOT / "lessons"
    if name == "N":
        assert value == number
    elif name == "B":
        assert f"\n| {value} | {number} |" in (lessons / "bugs" / "README.md").read_text(), f"no such bug: {value}"
    elif name == "ONLY":
        assert f"def {value}(" in next((lessons / "exercises").glob(f"{number}_*.py")).read_text()
    else:
        assert name == "STOP"
        assert list((lessons / "reading").glob(f"{int(value):02d}_*.md")), f"no such stop: {value}"


def known_flag(script: Path, flag: str) -> bool:
    """Return whether a script, or the part of the lab that declares its flags, has this one."""
    lab = ROOT / "vllm" / "minivllm_lab"
    files = [script, lab / "cli.py", *lab.glob(f"{script.stem[3:]}/*.py")]
    return any(f'"{flag}"' in path.read_text() for path in files)


@each_deck
def test_every_number_is_the_lessons(deck: slides.Deck):
    """A number on a slide or in its notes stands in the lesson, its notes, its exercise, its claims
    or its figures.
    """
    known = sources(deck.path.stem[:2])
    for slide in deck.slides:
        new = [value for value in numbers(PATH.sub("", f"{slide.body}\n{slide.notes}")) if value not in known]
        assert new == [], f"{slide.title}: {new}"


PATH = re.compile(r"\]\([^)]*\)|`vllm/\S+`|^\d\. ", re.MULTILINE)
"""Parts of a slide that are not text: targets of links, names of files, numbers of a list."""


def numbers(text: str) -> list[str]:
    return [value.replace(",", "") for value in words.NUMBER.findall(text)]


@cache
def sources(number: str) -> frozenset[str]:
    """Every number in what a lesson consists of, and the numbers of the lessons."""
    folder = ROOT / "lessons"
    paths = [path for pattern in ("", "notes/", "exercises/") for path in folder.glob(f"{pattern}{number}_*.*")]
    claims = tomllib.loads((folder / "claims.toml").read_text())["claim"]
    texts = [path.read_text() for path in paths]
    texts += [json.dumps(claim) for claim in claims if claim["lesson"] == number]
    texts += [figure_text(path) for path in folder.glob(f"figures/{number}_*.svg")]
    return frozenset([*numbers("\n".join(texts)), *(stem[:2] for stem in LESSONS)])


def figure_text(path: Path) -> str:
    """The words of a figure: its text elements, and its description."""
    svg = path.read_text()
    return "\n".join([*re.findall(r">([^<>]+)</text>", svg), *re.findall(r'aria-label="([^"]*)"', svg)])


def test_the_time_of_every_command_is_known_and_none_of_another():
    used = {command for deck in slides.decks(ROOT) for slide in deck.slides for command in slide.commands}
    guides = "".join(path.read_text() for path in (ROOT / "workshop" / "guides").glob("*.md"))
    known = slides.demos(ROOT)
    assert used <= known.keys()
    assert [command for command in known.keys() - used if f"```bash\n{command}\n" not in guides] == []
    for command, time in known.items():
        assert 0 < time.processor < 120, command
        assert time.seconds[0] < time.seconds[1] <= 120, f"{command}: too long for a demo"


def test_a_commands_line_has_a_range_and_what_the_first_run_adds():
    assert slides.Time(12.6, 20.2).words == "takes 12 to 21 s on two cores"
    assert slides.Time(9.9, 5.2, first=3.5).words == "takes 5 to 6 s on two cores; 4 s more the first time"
    assert slides.Time(0.2, 0.3).words == "takes 0 to 1 s on two cores"


@each_deck
def test_in_vllm_names_a_file_and_an_identifier_that_the_list_of_names_has(deck: slides.Deck):
    """`make lint` compares names and files too; here, that there are some."""
    slide = next(slide for slide in deck.slides if slide.title == "In vLLM")
    known = json.loads((ROOT / "tools" / "vllm_names.json").read_text())["names"]
    blocks = re.findall(r"^`(vllm/\S+\.py)`\n+((?:- .*\n?)+)", slide.body, re.MULTILINE)
    assert blocks, "no file with identifiers below it"
    for path, items in blocks:
        held = known[path]
        for owner, name in re.findall(r"^- `(?:(\w+)\.)?(\w+)`", items, re.MULTILINE):
            assert name in held[owner].split(), f"{path} has no {owner}.{name}"
        assert all(item.startswith("- `") for item in items.splitlines()), f"{path}: name the identifier first"


@each_deck
def test_the_tours_stop_opens_the_file_that_the_slide_names_first(deck: slides.Deck):
    """Compare `make read STOP=9` in the notes with the files of that stop's lines."""
    for slide in deck.slides:
        if stop := re.search(r"`make read STOP=(\d+)`", slide.notes):
            (page,) = (ROOT / "lessons" / "reading").glob(f"{int(stop[1]):02d}_*.md")
            opened = re.findall(r"/blob/v[\d.]+/(vllm/[^#)]+\.py)#L", page.read_text())
            named = re.findall(r"^`(vllm/\S+\.py)`$", slide.body, re.MULTILINE)
            assert named[0] in opened, f"stop {stop[1]} opens {sorted(set(opened))}"


# ---- the program -----------------------------------------------------------------------------------


def a_deck(folder: Path, body: str) -> slides.Deck:
    path = folder / "04_made_up.md"
    path.write_text(body)
    return slides.Deck(path)


def test_slides_are_split_at_rules_and_notes_at_their_word(tmp_path: Path):
    deck = a_deck(tmp_path, "# A\n\nNote:\nsay a\n\n---\n\n## B\n\n| x |\n| --- |\n| Note |\n")
    assert [slide.title for slide in deck.slides] == ["A", "B"]
    assert [slide.notes for slide in deck.slides] == ["say a", ""]


def test_a_step_of_a_moving_figure_is_that_step_alone(tmp_path: Path):
    figure = ROOT / "lessons" / "figures" / "04_opening.svg"
    first, last = ((tmp_path / slides.copied(figure, step, tmp_path)).read_text() for step in "16")
    assert "What each request lacks" in first
    assert "What each request lacks" not in last
    assert "animation" not in first + last


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("## A\n\n![four words of text](none.svg)\n", "there is no figure none.svg"),
        ("## A\n\n![four words of text](04_opening.svg#9)\n", "04_opening.svg has 6 steps, so not #9"),
        ("## A\n\n```bash\nmake tea\n```\n", f"04_made_up.md: {slides.DEMOS} does not say how long 'make tea' takes"),
    ],
)  # fmt: skip
def test_an_unknown_figure_step_or_command_is_refused(tmp_path: Path, body: str, message: str):
    (tmp_path / "04_opening.svg").symlink_to(ROOT / "lessons" / "figures" / "04_opening.svg")
    deck = a_deck(tmp_path, body)
    assert_refused(f"^{re.escape(message)}$", slides.section, deck.slides[0], deck, tmp_path, {})


def test_an_unknown_lesson_is_refused():
    assert_refused("has no 13_", slides.decks, ROOT, "13")
