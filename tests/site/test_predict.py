"""The page of the next step plays the recorded rounds, and tells a wrong answer the rule it missed."""

import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from e2e.browser import box_of, emptied_page, faultless
from lab.predict.by_hand import HABITS, STEP, Learner
from playwright.sync_api import Browser, Page

from minivllm_lab.predict import __main__ as command
from minivllm_lab.predict import page as predict_page
from minivllm_lab.predict.levels import LEVELS, load
from minivllm_lab.predict.mistakes import MISTAKES, RULES
from minivllm_lab.predict.page import rounds, rules
from minivllm_lab.predict.rounds import Decision, Round
from widgets import predict

pytestmark = pytest.mark.browser
PAGE = "lessons/predict.html"
ROUNDS = [puzzle for level in load() for puzzle in level]


@pytest.fixture(scope="module")
def game(browser: Browser) -> Iterator[Page]:
    """Open the game as a page of its own."""
    page = browser.new_page()
    page.set_content(predict_page.html())
    yield page
    page.close()


def answer(page: Page, decision: dict) -> str:
    """Fill in a decision and nothing else, ask, and return the reply."""
    for number in page.locator(".predict input[type=number]").all():
        number.fill("")
    for box in page.locator(".predict input[type=checkbox]").all():
        box.uncheck()
    for name, count in decision["tokens"].items():
        page.locator(f".predict input[name='{name}']").fill(str(count))
    for name in decision["preempted"]:
        page.locator(f".predict input[name='-{name}']").check()
    page.get_by_role("button", name="Ask vLLM").click()
    return page.locator(".predict-reply").inner_text()


def test_a_level_is_played_to_its_end_and_fits_a_telephone_and_a_screen(opened):
    level = rounds()[3]
    with opened(PAGE, 390) as page:
        page.get_by_role("button", name=f"4. {LEVELS[3].title}").click()
        for number, puzzle in enumerate(level["rounds"]):
            if number == 0:
                for mistake in puzzle["mistakes"][:2]:
                    said = answer(page, mistake)
                    assert rules()[mistake["rule"]]["says"] in said
                    assert ("vLLM decided:" in said) == (mistake is puzzle["mistakes"][1])
            elif number == 1:
                answer(page, puzzle["mistakes"][0])
                assert answer(page, puzzle["decision"]).startswith("Right.")
            elif number == 2:
                answer(page, puzzle["mistakes"][0])
                page.get_by_role("button", name="Show the answer").click()
                assert "vLLM decided:" in page.locator(".predict-reply").inner_text()
            else:
                assert answer(page, puzzle["decision"]).startswith("Right."), puzzle["source"]
            if number + 1 < len(level["rounds"]):
                page.get_by_role("button", name="Next round").click()
        count = len(level["rounds"])
        assert page.locator(".predict-score").inner_text() == f"{count - 3} of {count} right, 1 more at the second try."
        for width in (390, 1366):
            page.set_viewport_size({"width": width, "height": 800})
            assert box_of(page.locator(".predict"))["width"] <= width


def told(page: Page, answers: Sequence[tuple[Round, Decision]]) -> list[list[tuple[str, str]]]:
    """Return what the page says of each answer to a round, with the name of the rule."""
    plain = {id(puzzle): predict_page.plain(puzzle) for puzzle, _ in answers}
    pairs = [(plain[id(puzzle)], predict_page.decided(answer)) for puzzle, answer in answers]
    said = page.evaluate("pairs => pairs.map(([puzzle, answer]) => diagnose(puzzle, answer))", pairs)
    return [[(each["says"], each["rule"]) for each in answer] for answer in said]


@pytest.mark.parametrize(
    ("answer", "says", "rule"),
    [
        (Decision({"A": 8, "B": 1, "C": 2}), MISTAKES["decodes first"].says, "order"),
        (Decision({"A": 11, "B": 1}), "A lacks 10 tokens, so it cannot get 11.", "all it lacks"),
        (Decision({"A": 10, "B": 1}), "A gets 10, but no request may get more than 8 here.", "chunk limit"),
        (Decision({"A": 8, "B": 1, "C": 8}), "Your step has 17 tokens, but its budget is 12.", "budget"),
        (Decision({"A": 8, "C": 3}, frozenset("B")), "Look at B: you preempt it.", "blocks"),
        (Decision({"B": 1, "C": 3}), "Look at A: you give it nothing.", "chunk limit"),
        (Decision({"A": 8, "C": 3}), "Look at B: you give it nothing.", "all it lacks"),
    ],
)
def test_a_wrong_answer_is_told_a_rule(game: Page, answer: Decision, says: str, rule: str) -> None:
    assert told(game, [(STEP, answer)]) == [[(says, rule)]]


def test_more_requests_than_seats_and_a_wrong_victim_are_told(game: Page) -> None:
    full = replace(STEP, seats=2, decision=Decision({"A": 8, "B": 1}))
    tight = replace(STEP, decision=Decision({"A": 8}, frozenset("B")))
    assert told(game, [(full, STEP.decision), (tight, Decision({"B": 1}, frozenset("A")))]) == [
        [("After your step 3 requests run, but there are 2 seats.", "seats")],
        [("Look at A: you preempt it.", "victim")],
    ]


def test_two_wrong_rules_with_one_answer_are_both_told(game: Page) -> None:
    wrong = Decision({"B": 1})
    step = replace(STEP, mistakes=dict.fromkeys(("decodes first", "shortest first", "no seats"), wrong))
    assert [rule for _, rule in told(game, [(step, wrong)])[0]] == ["order", "seats"]


def test_every_wrong_rule_is_told_by_the_rule_it_breaks_or_two_others_say_as_much(game: Page) -> None:
    made = [(puzzle, name, wrong) for puzzle in ROUNDS for name, wrong in puzzle.mistakes.items()]
    for (puzzle, name, _), said in zip(made, told(game, [(puzzle, wrong) for puzzle, _, wrong in made]), strict=True):
        assert MISTAKES[name].rule in [rule for _, rule in said] or len(said) == 2, (puzzle.source, name)


def test_a_learner_with_a_wrong_habit_is_told_its_rule(game: Page) -> None:
    shares: list[list[bool]] = []
    for habit, names in HABITS.items():
        answers = [(puzzle, Learner(puzzle, habit).decide()) for puzzle in ROUNDS]
        said = told(game, [(puzzle, answer) for puzzle, answer in answers if answer != puzzle.decision])
        shares += [[not names.isdisjoint(rule for _, rule in each) for each in said]]
    assert min(sum(each) / len(each) for each in shares) >= 0.5
    num_told = sum(map(sum, shares))
    assert num_told > 70
    assert num_told >= 0.95 * sum(map(len, shares))


def test_a_slip_in_one_request_is_told_a_rule(game: Page) -> None:
    draw, slips = Random(4), []
    for puzzle in ROUNDS * 20:
        row = draw.choice(list(puzzle.requests.values()))
        tokens = {**puzzle.decision.tokens, row.name: draw.randint(1, row.lacks + 2)}
        slip = Decision(tokens, puzzle.decision.preempted - {row.name})
        slips += [(puzzle, slip)] if slip != puzzle.decision else []
    assert all(rule in RULES for said in told(game, slips) for _, rule in said[:1])
    assert all(told(game, slips))


def test_make_predict_writes_a_page_that_plays_and_opens_it(browser: Browser, tmp_path: Path, monkeypatch, capsys):
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    command.main(command.parser().parse_args(["--page", str(tmp_path / "new" / "game.html")]))
    assert "game.html" in capsys.readouterr().out
    page = emptied_page(browser, 1366, 800)
    with faultless(page):
        page.goto(shown[0])
        assert answer(page, rounds()[0]["rounds"][0]["decision"]).startswith("Right.")


def test_every_round_of_the_page_has_its_reasons():
    for level in rounds():
        for puzzle in level["rounds"]:
            assert any(reason["says"] for reason in puzzle["reasons"])
            assert {each["rule"] for each in (*puzzle["reasons"], *puzzle["mistakes"])} <= rules().keys()


def test_the_widget_plays_the_same_rounds_in_a_notebook(browser: Browser):
    widget = predict.show()
    assert (widget.levels, widget.rules) == (rounds(), rules())
    puzzle = widget.levels[4]["rounds"][0]
    page = emptied_page(browser, 1366, 800)
    page.set_content("<main></main>")
    page.add_script_tag(content=str(widget._esm).replace("export default", "window.widget ="))
    traits = {"levels": widget.levels, "rules": widget.rules}
    shows = "traits => widget.render({ model: { get: (name) => traits[name] }, el: document.querySelector('main') })"
    page.evaluate(shows, traits)
    page.get_by_role("button", name=f"5. {LEVELS[4].title}").click()
    mistake = puzzle["mistakes"][0]
    assert mistake["says"] in answer(page, mistake)
    page.get_by_role("button", name="5.").click()
    assert answer(page, puzzle["decision"]).startswith("Right.")
