"""Matrix products with fp32 or bf16 weights on a CPU, compiled by numba.

A weight `[out, in]` is laid out in panels of `PANEL` outputs: `[in, PANEL]`, so that a loop over
the inputs reads a panel sequentially. A program takes some rows of x and one panel, and processes
six rows at a time. Their 6 × PANEL sums stay in registers: 24 of 32 with AVX-512, else 12 of 16.
Every weight loaded is used for six rows, and every number of x for all outputs of the panel.

A bf16 panel holds pairs, two inputs of an output side by side: processors with bf16 instructions
multiply and add a pair at once, others convert it to fp32. The sums are fp32 and rounded once, when
they are stored.

A gated MLP's panels come in pairs, gate and up: one program computes both and stores silu(gate) ×
up, so that the two halves never go to memory. Where an adapter is still to be added to them, it
stores both.
"""

from __future__ import annotations

import numpy as np

from minivllm.kernels.cpu.cells import PanelLinearCells
from minivllm.kernels.cpu.lanes import (
    TILE_ROWS,
    WIDTH,
    has_wide_registers,
    load,
    multiply,
    multiply_tile,
    sigmoid,
    store,
)
from minivllm.kernels.cpu.programs import array_at, counter_of, jit, programs, take_programs

COLUMNS = 4 if has_wide_registers() else 1
PANEL = COLUMNS * WIDTH  # outputs
ROWS = 48  # per program, at most


@jit
def multiply_rows(sums, at, x, x_at, rows, width, panel, panel_at, bias, bias_at):
    """Write bias + rows of x × a panel, `[rows, PANEL]`, to `sums`, starting at `at`."""
    for row in range(0, rows, TILE_ROWS):
        here, x_here, count = at + row * PANEL, x_at + row * width, min(TILE_ROWS, rows - row)
        multiply_tile(sums, here, x, x_here, width, panel, panel_at, bias, bias_at, COLUMNS, count)


@jit
def gate_rows(sums, rows):
    """Overwrite gate with silu(gate) × up."""
    for at in range(0, rows * PANEL, WIDTH):
        gate, up = load(sums, at), load(sums, ROWS * PANEL + at)
        store(sums, at, multiply(multiply(gate, sigmoid(gate)), up))


@jit
def put_rows(out, at, stride, sums, sums_at, rows, left, tail):
    """Store the panel's outputs of each row, or the `left` ones if those are fewer. `stride` is
    a row's of out; `tail` has room for the last lanes of a panel that is padded.
    """
    count = min(PANEL, left)
    whole = count // WIDTH * WIDTH
    for row in range(rows):
        for column in range(0, whole, WIDTH):
            store(out, at + row * stride + column, load(sums, sums_at + row * PANEL + column))
        if whole < count:
            store(tail, 0, load(sums, sums_at + row * PANEL + whole))
            for lane in range(count - whole):
                out[at + row * stride + whole + lane] = tail[lane]


def multiply_panels(cells, element):
    """Run programs, each for `ROWS` rows and `PANEL` outputs, until none are left."""
    rows, outputs, width, parts = cells.rows, cells.outputs, cells.width, cells.parts
    x, out, panels = array_at(cells.x, 1, element), array_at(cells.out, 1, element), array_at(cells.panels, 1, element)
    panels_of_row = (outputs + PANEL - 1) // PANEL
    bias = array_at(cells.bias, panels_of_row * parts * PANEL, np.float32)
    sums = np.empty(2 * ROWS * PANEL, np.float32)  # of gate, then of up
    tail = np.empty(WIDTH, element)
    for program in take_programs(counter_of(cells), (rows + ROWS - 1) // ROWS * panels_of_row):
        first_row = program // panels_of_row * ROWS
        panel = program % panels_of_row
        count = min(ROWS, rows - first_row)
        for part in range(parts):
            index = panel * parts + part
            at = part * ROWS * PANEL
            weight_at = index * width * PANEL
            multiply_rows(sums, at, x, first_row * width, count, width, panels, weight_at, bias, index * PANEL)
        first = panel * PANEL
        if cells.gated:
            gate_rows(sums, count)
        halves = 1 if cells.gated else parts  # both side by side, for an adapter to be added to
        stride = halves * outputs
        for half in range(halves):
            at = first_row * stride + half * outputs + first
            put_rows(out, at, stride, sums, half * ROWS * PANEL, count, outputs - first, tail)


programs_for = programs(PanelLinearCells, multiply_panels)
