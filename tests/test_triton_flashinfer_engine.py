"""The whole engine on the FlashInfer backend over emulated kernels: the same tokens as on the reference."""

from __future__ import annotations

import pytest
import torch
from flashinfer_tools import Recording, documented
from keeping import keep
from test_triton_engine import two_turns
from triton_tools import INTERPRETED_ONLY

from minikv.kernels.flashinfer import backend as backend_module
from minikv.kernels.flashinfer import runs, shares
from minikv.kernels.flashinfer.backend import FlashInferBackend
from minikv.kernels.reference import ReferenceBackend

pytestmark = INTERPRETED_ONLY


@pytest.mark.parametrize(
    ("policy", "kv_dtype", "page_size", "head_dim"),
    [
        (None, torch.float16, 16, 64),
        ("adakv", torch.float16, 32, 64),
        ("gracekv", torch.float16, 16, 64),
        ("gracekv", torch.int8, 16, 64),
        (None, torch.float16, 16, 32),
    ],
)
def test_chunks_compression_and_decoding_give_the_tokens_of_the_reference(
    policy, kv_dtype, page_size, head_dim, monkeypatch
):
    monkeypatch.setattr(runs, "WORKSPACE_BYTES", 1 << 24)
    monkeypatch.setattr(shares, "TAIL", 3)
    merged, merge = [], backend_module.merge
    monkeypatch.setattr(backend_module, "merge", lambda *given: merged.append(1) or merge(*given))
    cache = None if policy is None else keep(policy, 0.4, refit=policy == "gracekv")
    options = cache, kv_dtype, page_size, head_dim, torch.float16
    library = Recording(documented())
    backend = FlashInferBackend(library)
    expected, given = two_turns(ReferenceBackend(), *options), two_turns(backend, *options)
    assert given == expected and not backend._broken
    assert bool(library.count("run")) == (kv_dtype == torch.float16 and head_dim == 64)
    assert bool(merged) == (policy == "gracekv" and kv_dtype == torch.float16)
