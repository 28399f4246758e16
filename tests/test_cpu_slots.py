"""The compiled kernels for trees against plain torch, for every instruction set of this processor, bit for
bit whatever the number of threads."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from test_compress import filled
from tiny import tiny_decoder
from torch import Tensor

from minikv.cache.compress import Compressor
from minikv.cache.evidence import Recorded
from minikv.cache.policies.base import LayerView, output_gram
from minikv.cache.policies.gracekv import GraceKV
from minikv.cache.policies.trees.measure import Damage
from minikv.cache.policies.trees.probes import observe
from minikv.cache.references import reference_queries
from minikv.cache.refit import refit
from minikv.cache.refit_targets import compressible
from minikv.kernels.cpu.backend import CpuBackend
from minikv.kernels.cpu.library import LibraryMissing, instruction_sets, load_library
from minikv.kernels.slots import SlotInput
from minikv.kernels.torch_cpu import TorchBackend
from minikv.models.config import RopeConfig
from minikv.models.rope import Rope

try:
    ISAS = instruction_sets(load_library())
except LibraryMissing as missing:
    pytest.skip(f"{missing}", allow_module_level=True)

ROPES = {
    "plain": RopeConfig(),
    "yarn": RopeConfig(kind="yarn", factor=4.0, original_context=256),
    "dynamic": RopeConfig(kind="dynamic", factor=2.0, original_context=256),
}


def view_of(
    lengths: tuple[int, ...],
    group: int = 3,
    width: int = 16,
    window: int = 6,
    future: int = 20,
    seed: int = 0,
) -> LayerView:
    """Random lanes of these lengths, whose entries stand for one to four tokens."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    kv_heads, longest, heads = len(lengths), max(lengths), len(lengths) * group
    tokens = 2 * longest + window
    positions = torch.full((kv_heads, longest), -1, dtype=torch.int64)
    for lane, length in zip(positions, lengths, strict=True):
        lane[:length] = torch.randperm(2 * longest, generator=random)[:length].sort().values
    counts = torch.randint(1, 5, (kv_heads, longest), generator=random)
    return LayerView(
        layer=0,
        keys=normal(kv_heads, longest, width),
        values=normal(kv_heads, longest, width) + 3 * normal(kv_heads, 1, width),
        log_mass=(counts * (1 + torch.rand(counts.shape, generator=random))).log(),
        counts=counts,
        positions=positions,
        valid=positions >= 0,
        num_tokens=tokens,
        group=group,
        output_weight=torch.empty(0, 0),
        output_gram=output_gram(normal(40, heads * width) / 3, width),
        queries=normal(heads, window, width),
        query_heads=torch.arange(heads),
        query_positions=torch.arange(tokens - window, tokens),
        residual_norms=torch.rand(window, generator=random) + 1,
        future_queries=normal(heads, future, width) if future else None,
    )


def ends(view: LayerView) -> Tensor:
    """Sinks, recent entries and a pin are protected."""
    place = torch.arange(view.valid.shape[1])
    ending = place >= view.valid.sum(dim=1, keepdim=True) - 3
    return view.valid & ((place < 2) | ending | ((place > 20) & (place < 24)))


def damage(view: LayerView, rope: Rope, backend: CpuBackend | None, **options) -> Damage:
    policy = GraceKV(6, rope, **options)
    slots = None if backend is None else backend.slots
    return policy.measure(replace(view, slots=slots), ends(view)).damage


def assert_equals_torch(view: LayerView, isa: str, kind: str = "plain", **options) -> None:
    rope = Rope(ROPES[kind], view.keys.shape[2])
    expected, found = damage(view, rope, None, **options), damage(view, rope, CpuBackend(2, isa), **options)
    for part in fields(Damage):
        of_torch, compiled = (getattr(each, part.name) for each in (expected, found))
        assert torch.equal(of_torch.isfinite(), compiled.isfinite())
        scale = of_torch[of_torch.isfinite()].abs().mean().item()
        torch.testing.assert_close(compiled, of_torch, rtol=2e-4, atol=1e-5 * scale)


def assert_same_bits(one: Damage, other: Damage) -> None:
    for part in fields(Damage):
        assert torch.equal(getattr(one, part.name), getattr(other, part.name)), part.name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("group", "width"), [(1, 64), (3, 16), (2, 80), (8, 32)])
def test_damages_equal_those_of_torch(isa, group, width):
    assert_equals_torch(view_of((300, 130), group, width), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("lengths", [(7, 2), (40, 0), (64, 200, 65), (128, 64)])
def test_lanes_of_any_length_equal_those_of_torch(isa, lengths):
    assert_equals_torch(view_of(lengths), isa)


@pytest.mark.parametrize("rows", [1, 3, 7, 10])
@pytest.mark.parametrize("future", [0, 20])
def test_rows_that_fill_no_vector_equal_those_of_torch(rows, future):
    """And rows of which the last query is taken twice."""
    assert_equals_torch(view_of((150, 90), future=future), ISAS[0], rows=rows)


@pytest.mark.parametrize("kind", ROPES)
def test_keys_turn_as_those_of_torch(kind):
    assert_equals_torch(view_of((300, 130)), ISAS[0], kind)


def test_a_query_that_sees_nothing_has_no_say_as_in_torch():
    view = view_of((300, 130))
    late = replace(view, query_positions=torch.arange(-6, 0))
    assert_equals_torch(late, ISAS[0])


@pytest.mark.parametrize("isa", ISAS)
def test_damages_are_the_same_bits_on_any_number_of_threads(isa):
    view, rope = view_of((700, 300, 500), width=64), Rope(ROPES["plain"], 64)
    first, *others = (damage(view, rope, CpuBackend(threads, isa)) for threads in (1, 2, 3, 8))
    for other in others:
        assert all(
            torch.equal(getattr(first, part.name), getattr(other, part.name)) for part in fields(Damage)
        )


def test_a_refit_that_need_not_look_again_gives_the_same():
    view, rope = view_of((300, 130), window=8), Rope(ROPES["plain"], 16)
    policy, protected = GraceKV(8, rope), ends(view)
    measured = policy.measure(replace(view, refit=True), protected)
    rows = policy.merge(view, measured, policy.assign([measured], 60)[0], protected)
    assert measured.seen is not None and policy.measure(view, protected).seen is None
    references = reference_queries(view)
    assert references is not None and measured.seen.is_of(references, compressible(view, rows))
    expected, found = refit(view, rows), refit(view, rows, seen=measured.seen)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.log_mass, expected.log_mass, rtol=1e-3, atol=1e-3)
    wrong = replace(measured.seen, wanted=~measured.seen.wanted, means=measured.seen.means + 1)
    assert torch.equal(refit(view, rows, seen=wrong).values, expected.values)


LOOKS = {
    "lanes of other lengths": ((300, 130), 3, 16, 6, 20),
    "an empty lane": ((40, 0), 2, 32, 6, 20),
    "parts of a head": ((5000, 4990), 1, 64, 16, 64),
    "no queries to come": ((65, 64), 3, 80, 8, 0),
    "less than a vector": ((3, 2, 1), 8, 16, 4, 2),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("case", LOOKS)
def test_queries_see_what_they_see_with_torch(case, refit, isa):
    lengths, group, width, window, future = LOOKS[case]
    view = view_of(lengths, group, width, window, future)
    # Queries among the entries, of which the first sees nothing: the last rows are hidden from them.
    at = torch.linspace(-1, view.num_tokens * 0.8, window).long()
    view = replace(view, query_positions=at, refit=refit)

    def observed(slots):
        rows = observe(replace(view, slots=slots), ends(view), 2, 8, 0.5, 0.75)
        seen = () if rows.seen is None else (rows.seen.means, rows.seen.log_sums)
        return rows.attention, rows.outputs, rows.normalisers, *seen

    expected, found = observed(None), observed(CpuBackend(1, isa).slots)
    assert len(found) == len(expected) == (5 if refit else 3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    for other in (CpuBackend(3, isa).slots, CpuBackend(2, isa).slots.alone()):
        assert all(map(torch.equal, observed(other), found))


@pytest.mark.parametrize("isa", ISAS)
def test_what_a_protected_entry_draws_is_not_lost_in_that(isa):
    """An entry that nearly everything goes to leaves the others their digits."""
    view = replace(view_of((300, 130), window=8), refit=True)
    sink = view.log_mass.clone()
    sink[:, 0] += 30
    view = replace(view, log_mass=sink)
    of_torch, compiled = (
        observe(replace(view, slots=slots), ends(view), 4, 8, 0.5, 0.75).seen
        for slots in (None, CpuBackend(1, isa).slots)
    )
    assert of_torch is not None and compiled is not None
    assert of_torch.log_sums.max() < of_torch.log_sums.new_tensor(20.0)
    torch.testing.assert_close(compiled.log_sums, of_torch.log_sums, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(compiled.means, of_torch.means, rtol=1e-3, atol=1e-4)


class Spoilt:
    """Kernels that are given nonsense for all that belongs to no node."""

    def __init__(self, backend: CpuBackend):
        self.slots = backend.slots
        self.look = backend.slots.look

    def sums_of_slots(self, given: SlotInput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = given.counts == 0
        assert out.any()
        keys, values = (rows.masked_fill(out[..., None], torch.nan) for rows in (given.keys, given.values))
        attention = given.attention.masked_fill(out[:, None, None], torch.nan)
        mass = given.log_mass.masked_fill(out, torch.nan)
        positions = given.positions.masked_fill(out, 1 << 40)
        spoilt = replace(
            given, keys=keys, values=values, attention=attention, log_mass=mass, positions=positions
        )
        return self.slots.sums_of_slots(spoilt)


def test_what_belongs_to_no_node_is_not_looked_at():
    view, rope, backend = view_of((300, 130)), Rope(ROPES["plain"], 16), CpuBackend(2)
    policy, slots = GraceKV(6, rope), Spoilt(backend)
    expected = damage(view, rope, backend)
    found = policy.measure(replace(view, slots=slots), ends(view)).damage
    assert_same_bits(expected, found)


@pytest.mark.parametrize("backend", [TorchBackend(), CpuBackend(1)], ids=["torch", "cpu"])
def test_policies_are_shown_the_kernels_of_the_models_backend(backend):
    store, seq = filled(20)
    view = Compressor(store, tiny_decoder(backend)).view(seq, 0, 20, Recorded())
    assert view.slots == backend.slots
    assert (view.slots is None) == isinstance(backend, TorchBackend)
