"""What a stage has returned is lent until its backward: a consumer in the same process, or a
message that is still to be sent, reads the very memory.
"""

import torch


class Loan:
    """The tensors of one output, and aliases of them for the reader.

    torch counts the writes to a tensor in place. An alias has a count of its own, so that it is
    known who wrote: the stage itself may not, the reader may in its forward, as it may write to a
    copy from another process. accept() adds the reader's writes to the stage's count, by which
    autograd sees them where the stage's backward needs the old values.

    Attributes:
        leaves: The output's, with the aliases in their places.
    """

    __slots__ = ("leaves", "_stage", "_microbatch", "_tensors", "_aliases", "_watched", "_counts",
                 "_passed_on")

    def __init__(self, stage, microbatch, leaves, borrowed):
        """``borrowed``: loans of the stage's inputs, which it may have returned as they are."""
        self._stage, self._microbatch = stage, microbatch
        self.leaves = list(leaves)
        self._tensors, self._aliases = [], []
        for index, leaf in enumerate(leaves):
            if _is_lent_as_it_is(leaf):
                self.leaves[index] = alias = leaf.data
                self._tensors.append(leaf)
                self._aliases.append(alias)
        self._watched = self._tensors + self._aliases
        self._counts = [tensor._version for tensor in self._watched]
        self._passed_on = [loan for loan in borrowed if loan._shares_memory_with(self)]

    def check(self):
        """
        Raises:
            ValueError: The stage wrote to it, or the reader did after its forward.
        """
        counts = [tensor._version for tensor in self._watched]
        if counts == self._counts:
            return
        self._refuse_own_writes(counts)
        raise ValueError(
            f"what stage {self._stage} returned for microbatch {self._microbatch} was changed in "
            "place by the stage that received it, after its forward; it is the sender's memory. "
            "Write to a .clone() of it."
        )

    def accept(self):
        """The reader's forward has ended; raises as ``check`` where the stage wrote meanwhile."""
        counts = [tensor._version for tensor in self._watched]
        if counts == self._counts:
            return
        self._refuse_own_writes(counts)
        for index in range(len(self._tensors)):
            if counts[len(self._tensors) + index] != self._counts[len(self._tensors) + index]:
                self._count_write(index)

    def _refuse_own_writes(self, counts):
        num_tensors = len(self._tensors)
        if counts[:num_tensors] != self._counts[:num_tensors]:
            raise ValueError(
                f"stage {self._stage} changed in place what it had returned for microbatch "
                f"{self._microbatch}, before its backward: what was read of it may be the one or "
                "the other. Return .clone() of what is written to again."
            )

    def _count_write(self, index):
        """The reader has written to this alias, or who has it from there."""
        torch.autograd.graph.increment_version(self._tensors[index])
        self._counts[index] += 1
        self._counts[len(self._tensors) + index] = self._aliases[index]._version
        address = self._aliases[index].data_ptr()
        for loan in self._passed_on:
            for its_index, alias in enumerate(loan._aliases):
                if alias.data_ptr() == address:
                    loan._count_write(its_index)

    def _shares_memory_with(self, other):
        addresses = {tensor.data_ptr() for tensor in other._tensors} - {0}
        return any(tensor.data_ptr() in addresses for tensor in self._tensors)


def _is_lent_as_it_is(leaf):
    """Whether its memory is read later, and its version tells of changes to that memory alone."""
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and not leaf.is_inference()  # has no version
        and leaf.is_contiguous()
        and leaf.nbytes == leaf.untyped_storage().nbytes()
    )
