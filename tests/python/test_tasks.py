"""Task texts, hints by name and by list, microbatch orders, limits, boundary values."""

import pickle

import pytest
import rrfp
import torch
from hypothesis import given
from hypothesis import strategies as st
from rrfp import boundary
from rrfp.agreement import mid_order
from rrfp.hints import NAMES, normalise_hint
from rrfp.layout import make_layout
from rrfp.limits import in_flight_limit, size_in_bytes

INDEX = st.integers(0, 2**31 - 1)


@given(INDEX, st.sampled_from(list(rrfp.TaskKind)), INDEX)
def test_text_round_trip(stage, kind, microbatch):
    task = rrfp.Task(stage, kind, microbatch)
    assert rrfp.parse_task(str(task)) == task
    assert str(task) == f"{stage}{kind.value}{microbatch}"


@pytest.mark.parametrize(
    "text", ["", "F", "2F", "F0", "2f0", "2X0", "-2F0", "2F-0", "2F0 ", "2F0F"]
)
def test_what_is_no_task_is_refused(text):
    with pytest.raises(ValueError, match="2F0"):
        rrfp.parse_task(text)


def test_hints():
    for name in NAMES:
        assert normalise_hint(name) == (name, [])
    texts = ["0F0", "0B0"]
    assert normalise_hint(texts) == ("order", texts)
    assert normalise_hint({1: ["1F0", "1B0"], 0: texts}) == ("order", [*texts, "1F0", "1B0"])
    assert normalise_hint([rrfp.parse_task(text) for text in texts]) == ("order", texts)


def test_mid_order_is_short_at_both_ends():
    assert mid_order([5, 1, 4, 2, 3]) == [1, 4, 0, 2, 3]  # costs 1 3 5 4 2
    assert mid_order([7]) == [0]
    assert mid_order([1, 1, 1, 1]) == [0, 2, 3, 1]  # ties in the caller's order


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_mid_order_rises_then_falls(costs):
    order = mid_order(costs)
    assert sorted(order) == list(range(len(costs)))
    walk = [costs[m] for m in order]
    top = walk.index(max(walk))
    assert walk[: top + 1] == sorted(walk[: top + 1])
    assert walk[top:] == sorted(walk[top:], reverse=True)


def test_limits():
    layout = make_layout(4, None, "loop")
    units = {None: (), 3: (3, 3, 3, 3), (4, 3, 2, 1): (4, 3, 2, 1), "1f1b": (4, 3, 2, 1),
             "1f1b+2": (6, 5, 4, 3)}
    for given_limit, expected in units.items():
        limit = in_flight_limit(given_limit, layout, "auto")
        assert (limit.units, limit.num_bytes) == (expected, ())
    mixed = in_flight_limit([4, "1KiB", 2, "2 kB"], layout, None)
    assert (mixed.units, mixed.num_bytes) == ((4, 0, 2, 0), (None, 1024, None, 2000))


def test_sizes():
    sizes = {"24GiB": 24 << 30, "1.5 GB": 1_500_000_000, "7B": 7, "512 MiB": 512 << 20,
             "2TiB": 2 << 40, "3kB": 3000, "3KiB": 3072}
    assert {text: size_in_bytes(text) for text in sizes} == sizes
    for text in ("", "24", "GiB", "-1GiB", "24GiBs", "1e3B", "24 gib", "1f1b", "nanB", "1..5GB"):
        assert size_in_bytes(text) is None


class FakeInbound:
    """What a receiver sees of an encoded parcel, without a network."""

    def __init__(self, metadata, owner):
        self.metadata = metadata
        self.owner = owner

    def capsules(self, layouts):
        capsules = []
        for (_, bits, shape), tensor in zip(layouts, self.owner, strict=True):
            assert torch.Size(shape).numel() * bits // 8 == tensor.nbytes
            as_bytes = tensor if tensor.dtype not in boundary._BYTE_DTYPES.values() else (
                tensor.flatten().view(torch.uint8))
            capsules.append(torch.utils.dlpack.to_dlpack(as_bytes.clone()))
        return capsules


def through_the_wire(value, needs_grad=()):
    tree, leaves = boundary.flatten(value)
    metadata, segments, owner = boundary.encode(boundary.Parcel(tree, leaves, needs_grad))
    assert [size for _, size in segments] == [tensor.nbytes for tensor in owner]
    return boundary.decode(FakeInbound(metadata, owner))


def test_what_is_remembered_of_a_tensor_is_all_that_tells_messages_apart():
    """A metadata is used again for the same dtype, shape and need of a gradient only."""
    for _ in range(2):
        for shape in ((6,), (2, 3), (3, 2), (6, 1)):
            for dtype in (torch.float32, torch.int32, torch.float64):
                for needs_grad in ((), (0,)):
                    got = through_the_wire(torch.ones(shape, dtype=dtype), needs_grad)
                    assert got.leaves[0].shape == shape and got.leaves[0].dtype == dtype
                    assert tuple(got.needs_grad) == needs_grad


DTYPES = sorted(boundary._CODE_OF_DTYPE, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_arrives(dtype, shape):
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = torch.arange(1, count + 1, dtype=torch.int64).remainder(2).to(torch.uint8)
    tensor = tensor.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    arrived = through_the_wire(tensor).value()
    assert arrived.dtype == dtype
    assert arrived.shape == torch.Size(shape)
    got, want = (t.contiguous().flatten().view(torch.uint8) for t in (arrived, tensor))
    assert torch.equal(got, want)


def test_trees_and_other_leaves_arrive():
    value = ({"a": torch.arange(3), "b": None}, [torch.ones(2, 2).t(), "word"], 7, None)
    parcel = through_the_wire(value, needs_grad=[2])
    arrived = parcel.value()
    assert torch.equal(arrived[0]["a"], value[0]["a"])
    assert arrived[0]["b"] is None
    assert torch.equal(arrived[1][0], value[1][0])
    assert arrived[1][1] == "word"
    assert arrived[2:] == (7, None)
    assert [parcel.leaves[i].shape for i in parcel.needs_grad] == [torch.Size((2, 2))]


def test_views_arrive_as_what_they_show():
    base = torch.arange(24.0).view(4, 6)
    for view in (base[:, 1:3], base.t(), base[1].expand(3, 6), base.chunk(2)[1], base[0, 0]):
        assert torch.equal(through_the_wire(view).value(), view)


def test_what_cannot_cross_is_refused():
    with pytest.raises(ValueError, match="to_dense"):
        through_the_wire(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="1048576"):
        through_the_wire((torch.ones(1), "x" * (1 << 20)))
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        through_the_wire((torch.ones(1), lambda: None))
