"""Metadata with bytes changed, cut and added: a clear error or a parcel, and nothing in between.

Would catch: a struct, index, key or pickle error that reaches the user as it is, a shape that asks
for memory that is not there, a decoder that runs on for ever.
"""

import random

import pytest
import torch
from torch.utils.dlpack import to_dlpack

from rrfp.boundary import Parcel, decode, encode, flatten

DTYPES = {(2, 32): torch.float32, (2, 64): torch.float64, (0, 64): torch.int64, (1, 8): torch.uint8,
          (6, 8): torch.bool, (2, 16): torch.float16, (4, 16): torch.bfloat16}
VALUES = (
    torch.arange(6.0).view(2, 3),
    (torch.ones(2, dtype=torch.int64), None, {"a": torch.zeros(0), "b": "word"}),
    [torch.ones(3).to(torch.float8_e5m2), 5, (torch.tensor(True),)],
)


class Received:
    """Stands for a message: as much payload as the value has, and zeros in it."""

    def __init__(self, metadata, payload_bytes):
        self.metadata = metadata
        self.payload_bytes = payload_bytes

    def capsules(self, layouts):
        tensors, left = [], self.payload_bytes
        for code, bits, shape in layouts:
            if any(extent < 0 for extent in shape):
                raise ValueError("an impossible shape")
            count = 1
            for extent in shape:
                count *= extent
            left -= count * bits // 8
            if left < 0:
                raise ValueError("too short")
            tensors.append(to_dlpack(torch.zeros(shape, dtype=DTYPES[code, bits])))
        return tensors


def received(value):
    tree, leaves = flatten(value)
    metadata, segments, _ = encode(Parcel(tree, leaves))
    return metadata, sum(size for _, size in segments)


def damaged(draw, metadata):
    changed = bytearray(metadata)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(4)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << draw.randrange(8)
        elif kind == 1 and changed:
            changed[at % len(changed)] = draw.choice((0, 1, 63, 64, 65, 127, 128, 254, 255))
        elif kind == 2:
            del changed[at:]
        else:
            changed[at:at] = draw.randbytes(draw.randint(1, 9))
    return bytes(changed)


@pytest.mark.parametrize("value", VALUES)
def test_whole_metadata_is_read(value):
    metadata, payload_bytes = received(value)
    parcel = decode(Received(metadata, payload_bytes))
    assert flatten(parcel.value())[0] == flatten(value)[0]


def test_damaged_metadata(seed):
    draw = random.Random(seed)
    num_refused = 0
    for _ in range(6000):
        metadata, payload_bytes = received(draw.choice(VALUES))
        try:
            assert type(decode(Received(damaged(draw, metadata), payload_bytes))) is Parcel
        except ValueError as error:
            assert "is damaged (" in str(error)
            num_refused += 1
    assert num_refused > 1000


@pytest.mark.parametrize("metadata", [
    b"", b"\0", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\0\x01\0\xff",
    b"\0\0\0\0\x3f\0\0", b"\0\0\0\0\xfe\0\0", b"\0\0\0\0\x01\0\x01" + b"\xff" * 8,
    b"\0\0\0\0\x01\0\x02" + b"\xff" * 7 + b"\x7f" + b"\xff" * 7 + b"\x7f",
    b"\0\0\0\0\0\0\0more",
])
def test_corners(metadata):
    with pytest.raises(ValueError, match="is damaged"):
        decode(Received(metadata, 64))
