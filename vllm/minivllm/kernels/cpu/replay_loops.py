"""Run a list of programs again, one call after another, in a single parallel region.

Each thread takes programs of the first call until none are left, waits for the programs that other
threads still run, and goes on to the second call. So the threads are woken once for the whole list,
and Python is not involved. A thread that gets no core, because the machine is busy, is not waited
for: it has taken no program, and finds none left when it comes.
"""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from minivllm.kernels.cpu.cells import ReplayCells
from minivllm.kernels.cpu.programs import add_to, array_at, exact_jit, intrinsic, programs

ROW = 8  # numbers of a call: function, address of its cells, threads that run it; one cache line
SPINS = 2_000  # some 50 µs
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@intrinsic
def call_with(typing_context, function, number):
    """Call the C function at `function` with an int64, and ignore what it returns."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def read(typing_context, address):
    """Read an int64 that other threads write."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def pause(typing_context):
    """Tell an x86 processor that this thread spins."""

    def generate(context, builder, signature, arguments):
        if IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@exact_jit
def wait_until_zero(address, give_way):
    """Spin for a moment, then offer the core to other threads, until the number is 0."""
    spins = 0
    while read(address) != 0:
        spins += 1
        if spins > SPINS:
            call_with(give_way, 0)
        else:
            pause()


def replay(cells):
    """Run all calls. Every thread of the region runs this.

    A thread leaves a call when all of its programs are taken. Those that others took are complete
    once nobody is in the call: a thread that took one had entered before.
    """
    table = array_at(cells.table, ROW * cells.calls, np.int64)
    for index in range(cells.calls):
        running = cells.table + 8 * (ROW * index + 2)
        add_to(running, 1)
        call_with(table[ROW * index], table[ROW * index + 1])
        add_to(running, -1)
        wait_until_zero(running, cells.give_way)


programs_for = programs(ReplayCells, replay, exact_jit)
