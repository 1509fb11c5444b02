"""Values between ranks that are threads of one process and share its only GPU: nothing is copied.

The sender keeps the parcel in a table of the session; what travels is a message of a few bytes
that carries its ticket. It leaves when the sender's stream has computed the parcel, like any
other, so that the receiver may read the tensors on its own stream as soon as it has the message.
"""

import itertools
import struct

import torch

# A length that no tree of a message has (rrfp/boundary.py), then the ticket.
_MARK = 0xFFFFFFFF
_ticket_format = struct.Struct("<IQ")


class SharedParcels:
    """The table; any thread.

    Tensors keep their version counters: a write in place on one side is seen on the other, and
    autograd refuses it where it needs the old values.
    """

    def __init__(self):
        self._parcels = {}
        self._tickets = itertools.count()

    def post(self, parcel):
        """What ``Runtime.post_tensors`` takes; None where the parcel has nothing on the GPU."""
        computed = next(
            (t for t in parcel.leaves if isinstance(t, torch.Tensor) and t.is_cuda and t.numel()
             and t.layout is torch.strided),
            None,
        )
        if computed is None:
            return None
        ticket = next(self._tickets)
        self._parcels[ticket] = parcel
        segment = (computed.data_ptr(), computed.element_size())
        return _ticket_format.pack(_MARK, ticket), [segment], computed

    def take(self, inbound, stream):
        """The parcel that a message stands for, to be read on the stream; None: none."""
        metadata = inbound.metadata
        if len(metadata) != _ticket_format.size:
            return None
        mark, ticket = _ticket_format.unpack(metadata)
        if mark != _MARK:
            return None
        parcel = self._parcels.pop(ticket)
        for leaf in parcel.leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(stream)  # its memory is the sender's: not reused before
        return parcel

    def clear(self):
        """After a step, whose messages may not all have been taken."""
        self._parcels.clear()
