"""How processes add up the gradients of tied parameters after their tasks.

Per group: every rank sends its holders' gradients to the rank of the first holder, piece by
piece; that rank adds each piece in the order of stages and sends the sum back. A rank runs at most
``_WINDOW`` pieces ahead of the sums, so little is on its way at any moment. Groups come one after
another and every rank takes them in the same order, so nobody waits in a circle.

Waits end with the step's error when a peer fails, dies or stalls, as all waits of a step do.
"""

import pickle

import torch

_MESSAGE_BYTES = 512 << 10  # a control message holds twice that
_WINDOW = 4
_SLICE_MS = 60_000


class TiedExchange:
    """One step's exchange on one rank; used by its worker."""

    def __init__(self, tied_step, runtime, rank_of_stage):
        self._step = tied_step
        self._runtime = runtime
        self._rank_of_stage = rank_of_stage

    @torch.no_grad()
    def run(self):
        """Give every holder of this rank the sum over its group.

        Raises:
            StatusError: The step ended on another rank.
        """
        for group in self._step.groups:
            by_rank = {}
            for holder in group:
                by_rank.setdefault(self._rank_of_stage[holder[0]], []).append(holder)
            first = self._rank_of_stage[group[0][0]]
            if self._runtime.rank == first:
                self._collect(group, by_rank)
            elif self._runtime.rank in by_rank:
                self._contribute(first, group, by_rank[self._runtime.rank])

    def _contribute(self, first, group, holders):
        plain = self._gradients(holders)
        self._send(first, pickle.dumps(list(plain)))
        if not pickle.loads(self._recv(first)):
            return
        total = self._empty_like(holders[0])
        pieces = _pieces(total, len(group))
        for index, (begin, end) in enumerate(pieces):
            for piece in pieces[index + _WINDOW - 1 if index else 0:index + _WINDOW]:
                self._send(first, b"".join(_bytes_of(g[slice(*piece)]) for g in plain.values()))
            total[begin:end] = _values_of(self._recv(first), total.dtype)
        for holder in holders:
            self._step.keep(holder, total)

    def _collect(self, group, by_rank):
        holders = by_rank.pop(self._runtime.rank)
        plain = self._gradients(holders)
        sending = {rank: pickle.loads(self._recv(rank)) for rank in by_rank}
        is_any = bool(plain) or any(sending.values())
        for rank in by_rank:
            self._send(rank, pickle.dumps(is_any))
        total = self._empty_like(group[0]) if is_any else None
        for begin, end in _pieces(total, len(group)) if is_any else ():
            values = {holder: gradient[begin:end] for holder, gradient in plain.items()}
            for rank, theirs in sending.items():
                body = self._recv(rank)
                if theirs:  # else it has no gradient, and the message is empty
                    of_rank = _values_of(body, total.dtype).reshape(len(theirs), -1)
                    values.update(zip(theirs, of_rank, strict=True))
            part = None
            for holder in group:
                if holder in values:
                    part = values[holder].clone() if part is None else part.add_(values[holder])
            total[begin:end] = part
            for rank in by_rank:
                self._send(rank, _bytes_of(part))
        for holder in holders:
            self._step.keep(holder, total)

    def _gradients(self, holders):
        """``{holder: its elements in a row}``; without those that have no gradient."""
        found = {holder: self._step.gradient(holder) for holder in holders}
        return {h: g.contiguous().reshape(-1) for h, g in found.items() if g is not None}

    def _empty_like(self, holder):
        like = self._step.parameters[holder]
        return torch.empty(like.numel(), dtype=like.dtype)

    def _send(self, peer, body):
        self._runtime.send_control(peer, body)

    def _recv(self, peer):
        while True:
            body = self._runtime.recv_control(peer, _SLICE_MS, is_tying=True)
            if body is not None:
                return body


def _pieces(total, num_holders):
    """[(begin, end)] of its elements; a rank may have to send that much of each holder at once."""
    step = max(1, _MESSAGE_BYTES // num_holders // total.element_size())
    return [(begin, min(begin + step, total.numel())) for begin in range(0, total.numel(), step)]


def _bytes_of(values):
    return values.view(torch.uint8).numpy().tobytes()


def _values_of(body, dtype):
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(dtype)
