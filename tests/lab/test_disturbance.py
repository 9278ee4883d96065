"""The control must find busy neighbours, and stay silent on a quiet machine."""

import pytest

from minivllm.platforms.cpu_time import CpuTimes
from minivllm_lab.disturbance import Control
from minivllm_lab.tables import Timed, closing, console


class FakeMachine:
    """A fake clock, threads and host, advanced by hand. The fixed work takes `piece` seconds."""

    def __init__(self, piece: float = 0.005) -> None:
        self.now, self.piece, self.stolen = 0.0, piece, 0.0
        self.threads = {1: CpuTimes(0.0, 0.0)}

    def work(self) -> None:
        self.now += self.piece

    def run(self, ran: float, waited: float = 0.0, stolen: float = 0.0) -> None:
        """Advance two cores and one thread by a second of wall clock."""
        before = self.threads[1]
        self.threads = {1: CpuTimes(before.ran + ran, before.waited + waited)}
        self.stolen += stolen
        self.now += 1.0

    def control(self) -> Control:
        return Control(self.work, lambda: self.now, lambda: self.threads, lambda: self.stolen, cores=2)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"ran": 0.95, "waited": 0.02}, ""),
        ({"ran": 0.6, "waited": 0.4}, "waited 40%"),
        ({"ran": 1.0, "stolen": 0.5}, "host gave 25%"),  # of all cores
    ],
)
def test_what_happens_in_a_watched_part_is_told_and_what_happens_outside_is_not(run: dict[str, float], words: str):
    machine = FakeMachine()
    control = machine.control()
    for _ in range(3):
        machine.run(ran=0.1, waited=0.9, stolen=1.0)
        with control.watch():
            machine.run(**run)
        machine.piece *= 1.1  # its clock goes down a little
    machine.run(ran=0.1, waited=0.9, stolen=1.0)
    assert words in control.disturbance()
    assert bool(words) == bool(control.disturbance())


@pytest.mark.parametrize(("waits_beside", "words"), [(0.0, ""), (0.002, "waited 29%")])
def test_where_a_part_loads_the_cores_itself_only_what_is_beside_it_tells(waits_beside: float, words: str):
    machine = FakeMachine()

    def work() -> None:
        machine.run(ran=machine.piece, waited=waits_beside)

    control = Control(work, lambda: machine.now, lambda: machine.threads, lambda: 0.0, cores=2, loads_cores=True)
    with control.watch():
        machine.run(ran=0.6, waited=0.4)
    assert words in control.disturbance()
    assert bool(words) == bool(control.disturbance())


def test_the_same_work_slower_is_a_disturbance_without_anything_from_the_system():
    machine = FakeMachine()
    control = Control(machine.work, lambda: machine.now, dict, lambda: 0.0)
    with control.watch():
        machine.piece *= 1.8
    assert "1.8 times as long" in control.disturbance()


def test_one_slow_piece_is_no_disturbance():
    pieces = iter([1, 1, 9, 1, 1, 1, 1, 1, 1, 1])
    machine = FakeMachine()

    def work() -> None:
        machine.now += next(pieces)

    control = Control(work, lambda: machine.now, dict, lambda: 0.0)
    with control.watch():
        pass
    assert control.disturbance() == ""


def test_nothing_watched_is_nothing_disturbed():
    control = FakeMachine().control()
    assert control.disturbance() == ""
    assert control.record() == {"waited": 0.0, "stolen": 0.0, "slowdown": 1.0}


def said(*sentences: str, disturbance: str = "") -> list[str]:
    with console.capture() as shown:
        closing(*sentences, disturbance=disturbance)
    text = " ".join(shown.get().split())  # sentences are broken into lines
    return [f"• {sentence.strip()}" for sentence in text.split("•")[1:]]


def test_a_disturbed_machine_withholds_what_rests_on_timings_and_says_why():
    assert said("counted", Timed("timed")) == ["• counted", "• timed"]
    assert said("counted", "also counted", disturbance="threads waited") == ["• counted", "• also counted"]
    first, second = said(Timed("one"), "counted", Timed("other"), disturbance="threads waited")
    assert first == "• counted"
    assert "threads waited" in second
    assert "run again" in second
