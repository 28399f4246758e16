"""How much memory this process may still use, and how many KV pages that buys."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool, page_bytes
from minikv.config import EngineConfig, format_size
from minikv.errors import ConfigError
from minikv.kernels.backend import CPU, EntryKernels
from minikv.models.config import ModelConfig

_CGROUP = Path("/sys/fs/cgroup")
# As torch says it, of a device and of the host.
_ASKED = re.compile(r"tried to allocate ([\d.]+ (?:bytes|[KMGT]iB))", re.IGNORECASE)


def available_bytes(device: torch.device = CPU) -> int:
    """Free memory as the system and an enclosing control group see it; or that of another device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [_system_bytes()]
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            limits.append(int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group, or one of an older kind
    return max(0, min(limits))


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory is short, of the host or of a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and ("allocate memory" in said or "error: out of memory" in said)


def shortage(error: BaseException, device: torch.device = CPU) -> str:
    """What an error for which `is_shortage` holds says of bytes, as a clause; "" if it is not known."""
    facts = []
    if said := _ASKED.search(str(error)):
        number, unit = said[1].split()
        facts.append(f"{format_size(int(number)) if unit == 'bytes' else said[1]} were asked for")
    with suppress(RuntimeError):  # a device that is full may not even answer
        facts.append(f"{format_size(available_bytes(device))} were free")
    return f" when {' and '.join(facts)}" if facts else ""


def _system_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        return 2 << 30


def pool_pages(
    config: EngineConfig,
    max_context: int,
    num_lanes: int,
    page_size: int,
    page_bytes: int,
    free: int,
    spare: int = 1,
) -> int:
    """Pages of the hot tier: as many as `tiers.hot` holds, or what `max_seqs` full contexts need but
    at most half of the `free` bytes, less those to spare. Raises ConfigError when not even one page per
    lane fits."""
    limit = config.tiers.hot_bytes
    if limit is None:
        wanted = config.max_seqs * -(-max_context // page_size) * num_lanes
        pages = min(wanted, free // 2 // page_bytes - spare)
        source = "half of the free memory"
    else:
        pages = limit // page_bytes - spare
        source = f"kv_hot = {format_size(limit)}"
    if pages < num_lanes:
        least = format_size((num_lanes + spare) * page_bytes)
        raise ConfigError(f"{source} is too little for this model's KV cache, which needs at least {least}.")
    return pages


def make_store(
    config: EngineConfig,
    model: ModelConfig,
    max_context: int,
    kv_dtype: torch.dtype,
    page_size: int,
    keys_transposed: bool,
    kernels: EntryKernels | None = None,
    device: torch.device = CPU,
) -> LaneStore:
    """A store for sequences of a model, over a pool of the size that `pool_pages` gives."""
    num_lanes = model.num_layers * model.num_kv_heads
    size = page_bytes(page_size, model.head_dim, kv_dtype)
    scratch = device != CPU  # for rows of a graph that no sequence has
    # One page stays zero for padded reads.
    num_pages = pool_pages(
        config, max_context, num_lanes, page_size, size, available_bytes(device), 1 + scratch
    )
    pool = PagePool(
        num_pages,
        page_size,
        model.head_dim,
        kv_dtype,
        config.debug_checks,
        keys_transposed,
        kernels,
        device,
        scratch,
    )
    return LaneStore(pool, config.max_seqs, model.num_layers, model.num_kv_heads, max_context)


def resolve_context(asked: int | None, model_limit: int) -> int:
    """The context in tokens: the model's own unless less is asked for."""
    if asked is None:
        return model_limit
    if asked > model_limit:
        raise ConfigError(f"max_context {asked} is more than this model's context of {model_limit} tokens.")
    return asked
