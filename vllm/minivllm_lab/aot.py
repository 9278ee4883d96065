"""Ahead-of-time compilation of Triton kernels for absent GPUs: shared memory, registers, spills,
instructions.

`compile_everywhere(kernel, arguments)` compiles ahead of time for sm_80, sm_90, sm_100 and gfx942
and reads the machine code. No GPU is needed. A process that interprets kernels cannot compile them,
so a worker process, started at the first call and ended with this process, does it with
`TRITON_INTERPRET=0`; Triton's own disk cache, keyed by a hash of the kernel's source, makes
repeated compilation fast.

Types, constants and alignment are derived from example arguments as in a launch: pointers and
integers are marked as divisible by 16 where they are, an integer 1 and None become constants.
"""

from __future__ import annotations

import atexit
import collections
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.errors import MinivllmError
from minivllm_lab.exercise import load

SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory (LDS on AMD) one program may use: CUDA C++ programming guide, CDNA 3
instruction set guide.
"""

TARGETS = tuple(SHARED_MEMORY)

WORKER_VARIABLE = "MINIVLLM_AOT_WORKER"
"""Names a script to run in place of this one as the worker: the tests' keeps what it has compiled."""

_LOADS = {  # machine instruction that loads from device memory -> bytes a thread loads with it
    r"(?:LDG|LDGSTS)\.\S*\b128\b": 16,
    r"(?:LDG|LDGSTS)\.\S*\b64\b": 8,
    r"LDG\.\S*\b[US]16\b": 2,
    r"LDG\.\S*\b[US]8\b": 1,
    r"(?:LDG|LDGSTS)\.\S*": 4,
    r"(?:global|buffer)_load_dwordx4": 16,
    r"(?:global|buffer)_load_dwordx2": 8,
    r"(?:global|buffer)_load_dword\b": 4,
    r"(?:global|buffer)_load_\w*short\w*": 2,
    r"(?:global|buffer)_load_\w*byte\w*": 1,
}
_TENSOR_CORE = ("UTCHMMA", "HGMMA", "HMMA", "v_mfma")


class Compiled(NamedTuple):
    """Resources that one kernel's machine code uses on one target."""

    kernel: str
    target: str
    shared: int
    """Bytes of shared memory one program needs."""
    registers: int
    """Registers per thread (vector registers on AMD)."""
    spilled: int
    """Bytes of stack and local memory a thread needs: registers that did not fit."""
    tensor_core: str | None
    """The matrix instruction used: HMMA (Ampere), HGMMA (Hopper), UTCHMMA (Blackwell), v_mfma
    (AMD), or None.
    """
    loads: Mapping[int, int]
    """Bytes a thread loads from device memory per instruction -> number of such instructions in
    the code.
    """

    @property
    def fits(self) -> bool:
        """Return whether its shared memory fits the target."""
        return self.shared <= SHARED_MEMORY[self.target]


def compile_for(
    target: str, kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Compiled:
    """Compile `kernel`, a `triton.jit` function whether interpreted or not, for one of `TARGETS`.

    `arguments` has an example for each parameter by name: a tensor or a type like "*bf16" for a
    pointer, a number, None, or the value of a constexpr. `options` are the launch's: num_warps,
    num_stages. Raises MinivllmError with the compiler's message if it does not compile.
    """
    if target not in SHARED_MEMORY:
        raise MinivllmError(f"unknown target {target!r}: use one of {', '.join(TARGETS)}")
    function = _python_function(kernel)
    parameters = inspect.signature(function).parameters
    missing = [name for name in parameters if name not in arguments]
    if missing:
        raise MinivllmError(f"kernel {function.__name__!r} needs an example for {', '.join(missing)}")
    is_ours = function.__module__.startswith(("minivllm.", "minivllm_lab."))  # others are loaded by path
    request = {
        "module": function.__module__ if is_ours else None,
        "path": inspect.getsourcefile(function),
        "kernel": function.__name__,
        "target": target,
        "arguments": {name: _describe(arguments[name]) for name in parameters},
        "options": dict(options or {}),
    }
    answer = _ask(json.dumps(request))
    if "error" in answer:
        raise MinivllmError(f"{function.__name__} does not compile for {target}: {answer['error']}")
    loads = {int(size): count for size, count in answer["loads"].items()}
    return Compiled(**{**answer, "kernel": function.__name__, "target": target, "loads": loads})


def _python_function(kernel: Any) -> Any:
    """Return the function under `triton.jit`, `triton.autotune` and the interpreter's wrapper."""
    while not inspect.isfunction(kernel):
        kernel = kernel.fn
    return kernel


def _describe(value: Any) -> dict:
    """Return one example argument as JSON."""
    if isinstance(value, str):
        return {"type": value} if re.fullmatch(r"\*?[a-z]+\d+\w*", value) else {"value": value}
    if hasattr(value, "data_ptr"):
        return {"type": "*" + _POINTEES[str(value.dtype).removeprefix("torch.")]}
    if hasattr(value, "primitive_bitwidth"):  # a tl.dtype given to a constexpr
        return {"dtype": value.name}
    return {"value": value}


_POINTEES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip


@functools.cache
def _worker() -> subprocess.Popen[str]:
    """Start the process that compiles; requests and answers are lines of JSON."""
    root = str(Path(__file__).resolve().parents[1])  # the folder that holds minivllm
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": os.environ.get("TRITON_DEFAULT_FP_FUSION", "1"),
        "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]),  # whatever this process can import
    }
    command = [sys.executable, "-P", os.environ.get(WORKER_VARIABLE, __file__)]
    pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=devnull, text=True, env=environment)
    atexit.register(process.kill)
    return process


@functools.cache
def _ask(request: str) -> dict:
    """Return the worker's answer to a request. If the worker dies, the next request starts another."""
    process = _worker()
    if process.poll() is not None:
        _worker.cache_clear()
        process = _worker()
    assert process.stdin is not None
    assert process.stdout is not None
    print(request, file=process.stdin, flush=True)
    if answer := process.stdout.readline():
        return json.loads(answer)
    _worker.cache_clear()
    raise MinivllmError(f"the compiler process died (exit code {process.wait()}) on {request}")


# ---- in the worker -------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until end of input. The compiler's own output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = _compile(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error).strip()[-2000:]}"}
        print(json.dumps(answer), file=answers, flush=True)


_load_once = functools.cache(load)


def _find_kernel(request: dict) -> Any:
    module = importlib.import_module(request["module"]) if request["module"] else _load_once(request["path"])
    kernel = getattr(module, request["kernel"])
    while not hasattr(kernel, "params"):  # under triton.autotune
        kernel = kernel.fn
    return kernel


def _specializes(parameter: Any, value: object) -> bool:
    """Return whether a launch is compiled specially for this value."""
    return not (parameter.do_not_specialize or isinstance(value, (bool, float)))


def _specialize(kernel: Any, arguments: dict) -> tuple[dict, dict, dict]:
    """Return (signature, constants, attributes) of a launch with these arguments."""
    import triton.language as tl

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        example = arguments[parameter.name]
        value = example.get("value")
        if "dtype" in example:
            signature[parameter.name], constants[parameter.name] = "constexpr", tl.dtype(example["dtype"])
        elif "type" in example:
            signature[parameter.name] = example["type"]
            if example["type"].startswith("*"):
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (value == 1 and _specializes(parameter, value)):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, bool):
            signature[parameter.name] = "i1"
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and _specializes(parameter, value):
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return signature, constants, attributes


def _compile(request: dict) -> dict:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _find_kernel(request)
    signature, constants, attributes = _specialize(kernel, request["arguments"])
    name = request["target"]
    target = GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)
    source = ASTSource(kernel, signature, constants, attributes)
    return figures_of(source, target, request["options"])


def figures_of(source: Any, target: Any, options: Mapping[str, Any]) -> dict:
    """Compile one of Triton's sources in this process, and return the figures of the machine code."""
    import triton

    built = triton.compile(source, target=target, options=dict(options))
    read = _figures_amd if target.backend == "hip" else _figures_nvidia
    return {"shared": built.metadata.shared, **read(built.asm)}


def _figures_nvidia(code: Mapping[str, Any]) -> dict:
    """Read the figures with the two tools bundled in Triton's wheel."""
    from triton.backends import nvidia

    tools = Path(nvidia.__path__[0]) / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code["cubin"])
        file.flush()

        def run(tool: str, *options: str) -> str:
            command = [str(tools / tool), *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = run("cuobjdump", "--dump-resource-usage")
        instructions = run("nvdisasm", "-c", "--no-dataflow")  # it takes a third of the time, for jumps' targets only
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"], **_instructions(instructions)}


def _figures_amd(code: Mapping[str, Any]) -> dict:
    """Read the figures from the metadata at the end of the assembly."""
    metadata = re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", code["amdgcn"])
    used = {key: int(value) for key, value in metadata}
    figures = {"registers": used["vgpr_count"], "spilled": used["private_segment_fixed_size"]}
    return figures | _instructions(code["amdgcn"])


def _instructions(code: str) -> dict:
    loads: collections.Counter[int] = collections.Counter()
    for instruction in re.findall(r"\b(?:LDG\.|LDGSTS\.|global_load_|buffer_load_)\S*", code):
        loads[next(size for pattern, size in _LOADS.items() if re.match(pattern, instruction))] += 1
    tensor_core = next((name for name in _TENSOR_CORE if re.search(rf"\b{name}", code)), None)
    return {"tensor_core": tensor_core, "loads": dict(loads)}


if __name__ == "__main__":
    serve()
