"""Compile every Triton kernel for sm_80, sm_89 and sm_90 without a GPU, and print what it takes.

    python benchmarks/compile_kernels.py [--arch 90] [--head-dims 64 128]

The backend is called as the engine calls it, with tensors on the CPU and a driver that only says which
architecture it is, so that argument types, alignment and block shapes are those of the real launches. The
table has registers, bytes of the stack (where spilled registers go), shared memory and the tensor core
instruction used. Exit status 1 if a kernel does not compile, spills, or wants more shared memory than a block
may have. Says nothing about speed. Results are cached by Triton: a second run takes seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Triton looks at these when it is imported.
os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from minikv.cache.pool import PagePool
from minikv.kernels.batch import Batch

# Bytes of shared memory that one block may have.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448}
HEAD_DIMS = (64, 96, 128, 256)
KERNELS = {
    "backend": ("rotate_and_write", "attend_lanes", "merge_splits"),
    "entries": ("copy_entries", "put_rounded"),
}


@dataclass(frozen=True)
class Case:
    """What a model and its pool are like."""

    head_dim: int
    dtype: torch.dtype
    masses: bool
    group: int = 4
    page_size: int = 16

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        masses = "masses" if self.masses else "-"
        return f"{self.head_dim:4} {kind:9} {masses:7} {self.group:3} {self.page_size:3}"


def cases(head_dims: list[int]) -> list[Case]:
    """Every head size with every kind of pool, and some groups and the other page size beside them."""
    kinds = [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True), (torch.int8, True)]
    kinds.append((torch.float32, True))
    listed = [Case(head_dim, *kind) for head_dim, kind in product(head_dims, kinds)]
    others = ((7, 16), (16, 16), (1, 32), (8, 32))
    return listed + [Case(head_dims[0], torch.bfloat16, True, *other) for other in others]


@dataclass
class Compiled:
    """One kernel for one architecture."""

    name: str
    registers: int
    stack: int
    shared: int
    tensor_core: str
    seconds: float

    def problem(self, arch: int) -> str:
        if self.stack:
            return "spills"
        return "too much shared memory" if self.shared > SHARED_LIMIT[arch] else ""


class Compiling:
    """In the place of a kernel: `kernel[grid](...)` compiles instead of launching."""

    def __init__(self, kernel: Any, name: str, done: list[Compiled]):
        self.kernel, self.name, self.done = kernel, name, done
        self.seen: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_for(*arguments: Any, **options: Any) -> None:
            started = time.perf_counter()
            made = self.kernel.warmup(*arguments, grid=grid, **options)
            if made.hash not in self.seen:
                self.seen.add(made.hash)
                self.done.append(measured(self.name, made, time.perf_counter() - started))

        return compile_for


def measured(name: str, made: Any, seconds: float) -> Compiled:
    """What a compiled kernel takes, as NVIDIA's own tool reads it from the binary."""
    from triton.knobs import nvidia  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(made.asm["cubin"])
        command = [nvidia.cuobjdump.path, "-res-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    ptx = made.asm["ptx"]
    tensor_core = next((name for name in ("wgmma", "mma.sync") if name in ptx), "-")
    return Compiled(name, int(found[1]), int(found[2]), made.metadata.shared, tensor_core, seconds)


def pretend(arch: int) -> None:
    """Make Triton compile for an architecture that is not there."""
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.backends.driver import DriverBase  # pyright: ignore[reportMissingImports]
    from triton.runtime.driver import driver  # pyright: ignore[reportMissingImports]

    class Driver(DriverBase):
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            # Kernels are kept per device: without a number of its own sm_90 would get the binary of sm_80.
            return arch

        def get_current_stream(self, device: int) -> int:
            return 0

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

        def get_device_interface(self) -> Any:
            return None

    driver.set_active(Driver())


def batch_of(case: Case) -> Batch:
    """Sequences with one new row, with some and with many: each is another form of the attention kernel."""
    rows, past = [1, 1, 1, 20, 80], 40
    pool = PagePool(64, case.page_size, case.head_dim, case.dtype)
    starts = [sum(rows[:n]) for n in range(len(rows) + 1)]
    positions = torch.arange(starts[-1])
    angles = torch.zeros(starts[-1], case.head_dim)
    tables = torch.zeros(len(rows), 3, 2, 8, dtype=torch.int32)
    lengths = torch.full((len(rows), 3, 2), past)
    masses = [case.masses] * len(rows)
    return Batch(
        pool, positions, positions, positions, starts, positions, tables, lengths, masses, angles, angles
    )


def compile_case(case: Case, backend: Any) -> None:
    """Launch, that is compile, everything that a step and a compression do."""
    batch = batch_of(case)
    dtype = torch.bfloat16 if case.dtype == torch.int8 else case.dtype
    backend.plan(batch)
    qkv = torch.zeros(batch.num_rows, 2 * case.group + 4, case.head_dim, dtype=dtype)
    new = backend.rotate_and_write(qkv, batch, 0)
    backend.attend(*new, batch, 0)
    if case.masses:
        # What is left to Triton of lanes that FlashInfer reads the end of.
        none, every = np.arange(0), np.arange(batch.num_sequences)
        batch.plan = backend.plan_of(batch, none, every, batch.past_lengths)
        backend.attend(*new, batch, 0)
    slots, rows = torch.arange(40), torch.zeros(40, case.head_dim)
    backend.entries.move(batch.pool, slots, slots)
    backend.entries.replace(batch.pool, slots, rows, rows, slots)


def main() -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90], choices=SHARED_LIMIT)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    given = parser.parse_args()

    import triton  # pyright: ignore[reportMissingImports]

    from minikv.kernels.triton import backend as backend_module
    from minikv.kernels.triton import entries as entries_module

    modules = {"backend": backend_module, "entries": entries_module}
    done: list[Compiled] = []
    for module, names in KERNELS.items():
        for name in names:
            setattr(modules[module], name, Compiling(getattr(modules[module], name), name, done))
    print(f"triton {triton.__version__}")
    print("arch kernel            head pool     masses  grp pg  registers stack  shared tensor    s")
    problems = 0
    for arch, case in product(given.arch, cases(given.head_dims)):
        pretend(arch)
        done.clear()
        compile_case(case, backend_module.TritonBackend())
        for kernel in done:
            problem = kernel.problem(arch)
            problems += bool(problem)
            print(
                f"{arch:4} {kernel.name:16} {case} {kernel.registers:9} {kernel.stack:6} {kernel.shared:7} "
                f"{kernel.tensor_core:8} {kernel.seconds:4.1f}  {problem}",
                flush=True,
            )
    print(f"{problems} of the kernels spill or do not fit" if problems else "no kernel spills, all fit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
