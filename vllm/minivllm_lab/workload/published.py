"""Published measurements of vLLM, and what the model says of each.

    uv run python -m minivllm_lab.workload --errors            # the table of errors
    uv run python -m minivllm_lab.workload --errors --write    # compute it again, also in lessons/workload.md

The rows that were kept aside from the calibration give each prediction its usual error. They are simulated
once and kept in `modelled.json`.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from minivllm_lab.workload.load import Load, drawn_lengths, make_load
from minivllm_lab.workload.measured import measure
from minivllm_lab.workload.server import CONSTANTS, GENERATIONS, Constants, Generation, Server, capacity
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model

HERE = Path(__file__).parent
MODELLED = HERE / "modelled.json"
KINDS = {
    "decode": ("gap between tokens, median", 0.10),
    "prefill": ("time to first token, median", 0.15),
    "tail": ("99th percentile of either", None),
    "throughput": ("saturated throughput", 0.20),
    "clients": ("throughput of a few clients", None),
    "knee": ("knee", 0.25),
}
"""The prediction that each kind of row tests, and the median error that is the goal."""
ASIDE = "kept aside"


class Source(NamedTuple):
    """A publication of rows, and the server that they were measured on."""

    name: str
    lab: str
    role: str
    address: str
    where: str
    date: str
    vllm: str
    gpu: str
    note: str = ""


class Row(NamedTuple):
    """One published figure; a knee is a range of loads."""

    source: Source
    kind: str
    metric: str
    model: str
    prompt: int | str
    output: int | str
    load: str
    value: float | Sequence[float]

    @property
    def key(self) -> str:
        """Its name in `modelled.json`."""
        return " | ".join(map(str, (self.source.name, self.metric, self.model, self.prompt, self.output, self.load)))

    def server(self, constants: Constants = CONSTANTS, hosts: Sequence[Generation] = GENERATIONS) -> Server:
        """Return the server that it was measured on."""
        name, _, tp = self.model.partition(" tp")
        longest = 2 ** (self.requests.longest + 1).bit_length() if self.load != "knee" else 4096
        model = known_model(name)
        limit = min(longest, model.max_position_embeddings or longest)
        return Server(
            model, get_hardware(self.source.gpu), int(tp or 1), self.source.vllm, max_model_len=limit,
            constants=constants, hosts=tuple(hosts),
        )  # fmt: skip

    @property
    def requests(self) -> Load:
        """The load, as it is simulated."""
        return _requests(self.prompt, self.output, self.load)

    def modelled(self, constants: Constants = CONSTANTS, hosts: Sequence[Generation] = GENERATIONS) -> float:
        """Return the model's figure, in the row's unit."""
        server = self.server(constants, hosts)
        if self.kind == "knee":
            prompt, output = (int(str(tokens).removeprefix("~")) for tokens in (self.prompt, self.output))
            return capacity(server, prompt, output)
        return measure(server, self.requests).metric(self.metric)

    def error(self, modelled: float) -> float:
        """Return (modelled − published) / published; of a knee's range, the nearer end counts, and 0 inside."""
        if isinstance(self.value, Sequence):
            low, high = self.value
            return modelled / high - 1 if modelled > high else min(0.0, modelled / low - 1) if low else 0.0
        return modelled / self.value - 1


@cache
def _requests(prompt: int | str, output: int | str, load: str) -> Load:
    how, _, count = load.partition(" x")
    number = float(how[1:]) if how != "all" else None
    lengths = drawn_lengths(prompt, output, int(count))
    if how[0] == "q":
        return make_load(load, lengths, rate=number)
    return make_load(load, lengths, clients=int(number) if number else None)


@cache
def published_rows() -> tuple[Row, ...]:
    """Return every row, in the file's order."""
    sources = tomllib.loads((HERE / "published.toml").read_text())["source"]
    return tuple(
        Row(source, *row)
        for fields in sources
        for source in [Source(**{name: value for name, value in fields.items() if name != "rows"})]
        for row in fields["rows"]
    )


@cache
def modelled_figures() -> dict[str, float]:
    """Return the model's figures, by the rows' keys, as they were last written."""
    return json.loads(MODELLED.read_text())


def write_modelled() -> None:
    """Simulate every row and keep the figures."""
    figures = {row.key: float(f"{row.modelled():.4g}") for row in published_rows()}
    MODELLED.write_text(json.dumps(figures, indent=0) + "\n")
    modelled_figures.cache_clear()


def errors(rows: Iterable[Row]) -> list[float]:
    """Return how far off the model is on each row, as a share of the published figure."""
    return [abs(row.error(modelled_figures()[row.key])) for row in rows]


class KnownError(NamedTuple):
    """The error of predictions of one kind, on rows that were kept aside."""

    rows: int
    median: float
    worst: float
    independent: float | None
    """The median over the labs of which no page calibrates, if there are any."""

    def __str__(self) -> str:
        usual = f"± {self.median:.0%}" if self.median else f"inside most of {self.rows} ranges"
        return f"{usual}, at worst {self.worst:.0%}"


@cache
def known_error(kind: str) -> KnownError:
    """Return the error of one kind of prediction."""
    rows = published_rows()
    fitted_labs = {row.source.lab for row in rows if row.source.role != ASIDE}
    aside = [row for row in rows if row.source.role == ASIDE and row.kind == kind]
    off, alone = errors(aside), errors(row for row in aside if row.source.lab not in fitted_labs)
    return KnownError(len(off), statistics.median(off), max(off), statistics.median(alone) if alone else None)
