"""A stage's backward in two halves: I, the gradients it must send, and W, those it keeps.

``run_input_half`` runs I and returns what W has to do. Each piece of work is done once, nothing
stays alive for W but the factors of the products that are put off, and hooks fire once: those of
tensors at I, those of parameters when their gradient is complete, at W. Hooks that are set on
graph nodes themselves (``tensor.grad_fn.register_hook``) see at I the gradients of I alone.

Where a graph has nothing to put off, or cannot be run in halves, it is *fused*: I is the whole
backward, W does nothing, and ``fused_because`` says why. Where no input takes a gradient it is
the other way round: nobody waits for I, so W is the whole.
"""

import torch
from torch.autograd.graph import GradientEdge

from rrfp.backward_pass import gradients_of, run_backward
from rrfp.cut_memory import CutMemory
from rrfp.gradient_graph import NO_PARAMETER
from rrfp.leaf_gradients import Additions

# W hands gradients to the parameters whenever it has computed this much; those wait that a hook
# of several tensors takes.
_BATCH_BYTES = 64 << 20


class SplitMemory:
    """What a stage knows of its backwards from one microbatch to the next.

    ``watch`` is the ``HookWatch`` of the only thread that adds gradients to the stage's
    parameters; None where other threads may add to the same.
    """

    def __init__(self, watch=None):
        self.cuts = CutMemory()
        self.watch = watch
        self.adds_in_products = False  # W adds a product to a ``.grad`` while it computes it
        self._changes_before = None

    def begin_step(self, adds_in_products=False):
        """No graph of an earlier forward is used from here on."""
        self.adds_in_products = adds_in_products
        if self.watch is not None:
            self.watch.look()
            self._changes_before = self.watch.num_changes

    def has_no_hooks(self):
        """Whether no tensor of this step's graphs can have a hook."""
        if self.watch is None:
            return False
        self.watch.look()
        return self.watch.num_changes == self._changes_before


class WeightHalf:
    """What is left for W; this one: nothing.

    Attributes:
        fused_because: Why I was the whole backward; None if it was not.
    """

    def __init__(self, fused_because=None):
        self.fused_because = fused_because

    def run(self):
        """Add the gradients of the parameters to their ``.grad``; once."""


class _Whole(WeightHalf):
    """No input takes a gradient: W is the whole backward."""

    def __init__(self, roots, gradients, memory):
        super().__init__()
        self._roots, self._gradients, self._memory = roots, gradients, memory

    def run(self):
        memory, roots, gradients = self._memory, self._roots, self._gradients
        self._memory = self._roots = self._gradients = None
        found = memory.cuts.cut(roots, None) if memory.adds_in_products else None
        # Hooks would not run at the products where the graph is cut off.
        if found is None or found.cut.fused_because or not _is_plain(memory, found.cut):
            del found  # it holds factors, which the engine lets go of one by one
            run_backward(roots, gradients)
        else:
            half = _begin(memory, found, roots, gradients, None, is_plain=True)
            del found, roots, gradients  # W lets go of each factor after its use
            half.run()


class _Pieces(WeightHalf):
    """The products put off, and the gradients that I has kept."""

    def __init__(self, fused_because, memory):
        super().__init__(fused_because)
        self._memory = memory
        self._waiting = []  # (PutOff, factors, twigs, gradient, its version when it was taken)
        self._kept = []  # (leaf, gradient)
        self._owners = ()

    def keep_alive(self, nodes):
        """Until W is done. A custom function's node goes with the graph before it, though Python
        holds it (in torch before 2.13), and a gradient edge to it leads nowhere then.
        """
        self._owners = nodes

    def put_off(self, put_off, factors, twigs, gradient):
        """Leave a product to W, whose output has this gradient."""
        if gradient is not None:
            self._waiting.append((put_off, factors, twigs, gradient, gradient._version))

    def keep(self, leaf, gradient):
        if gradient is not None:
            self._kept.append((leaf, gradient))

    def run(self):
        with torch.no_grad():
            self._run()

    def _run(self):
        additions = Additions(self._memory.watch, self._memory.has_no_hooks())
        last_use = {
            group: place for place, (put_off, *_) in enumerate(self._waiting)
            for group in put_off.groups
        }
        open_groups = {}  # group -> ([edge], [gradient]) until its last product is there
        num_bytes = 0  # of the gradients that wait to be added
        self._waiting.reverse()
        for place in range(len(self._waiting)):
            put_off, factors, twigs, gradient, version = self._waiting.pop()
            if gradient._version != version:
                _raise_changed(gradient, version)
            for tensor, version in zip(factors.tensors, factors.versions):
                if tensor._version != version:
                    _raise_changed(tensor, version)
            totals = None
            if self._memory.adds_in_products:
                totals = [None if leaf is None else additions.total_of(leaf, is_transposed)
                          for (leaf, _), is_transposed in zip(twigs, put_off.transposed)]
            found = put_off.product.gradients(gradient, factors, put_off.transposed, totals)
            tensor = factors = gradient = totals = None
            for (leaf, edge), value, group, is_transposed in zip(
                twigs, found, put_off.groups, put_off.transposed
            ):
                if value is None:
                    continue  # is added
                num_bytes += value.nbytes
                if leaf is not None:
                    additions.to_leaves.append((leaf, value, edge, is_transposed))
                else:
                    of_group = open_groups.setdefault(group, ([], []))
                    of_group[0].append(GradientEdge(*edge))
                    of_group[1].append(value)
            found = value = None
            for group in list(open_groups):
                if last_use[group] == place:
                    additions.through_graph(*open_groups.pop(group))
            if num_bytes >= _BATCH_BYTES:
                additions.run(is_last=False)
                num_bytes = 0
        for leaf, gradient in self._kept:
            additions.to_leaves.append((leaf, gradient, (leaf, 0), False))
        self._kept = []
        additions.run()
        self._owners = ()


def _raise_changed(tensor, version):
    raise RuntimeError(
        f"a tensor of shape {tuple(tensor.shape)} that the weight gradients need was changed in "
        f"place between the input gradient and the weight gradient (version {tensor._version}, "
        f"expected {version}). Do not change saved tensors or gradients in place, or pass "
        "split_backward=False."
    )


def run_input_half(roots, gradients, anchor, in_order=False, memory=None):
    """Run I and return the ``WeightHalf`` for W.

    Args:
        roots: Outputs of the stage that take a gradient.
        gradients: One for each root, none of them None.
        anchor: The leaf behind the stage's received inputs; None when they take no gradient.
        in_order: No parameter gradient may be added before W, not even of a fused graph.
        memory: The stage's ``SplitMemory``; None: nothing is known of it.

    Raises:
        RuntimeError: ``in_order``, and the graph can neither be split nor kept.
        What hooks, custom functions and torch's autograd raise.
    """
    if not roots:
        return WeightHalf()
    memory = memory or SplitMemory()
    found = None if anchor is None else memory.cuts.cut(roots, anchor)
    if found is None:
        return _Whole(roots, gradients, memory)
    cut = found.cut
    if cut.fused_because is not None and not (in_order and cut.kept):
        if in_order and cut.fused_because != NO_PARAMETER:
            raise RuntimeError(
                f"the backward of this stage could be split in earlier steps and now it cannot: "
                f"{cut.fused_because}. A deterministic step needs to know that beforehand; build "
                "a new Pipeline after such a change."
            )
        run_backward(roots, gradients)
        return WeightHalf(cut.fused_because)
    return _begin(memory, found, roots, gradients, anchor, _is_plain(memory, cut))


def _is_plain(memory, cut):
    """Whether what arrives at a node is what it works with: no hook changes it before."""
    return memory.has_no_hooks() and not cut.has_foreign


def _begin(memory, graph, roots, gradients, anchor, is_plain):
    """I of a graph that is cut."""
    nodes, edges, cut, _ = graph
    kept = [nodes[place] for place in cut.kept]
    targets = [GradientEdge(leaf, 0) for leaf in kept]
    if anchor is not None:
        targets.append(anchor)
    pieces = _Pieces(cut.fused_because, memory)
    products = []
    for put_off, factors in zip(cut.put_off, graph.factors):
        twigs = [  # (leaf, edge) of each gradient
            (None if leaf is None else nodes[leaf], edges[edge])
            for leaf, edge in zip(put_off.leaves, put_off.edges)
        ]
        products.append((put_off, factors, twigs))
    takers = [nodes[put_off.place] for put_off in cut.put_off]
    if cut.has_foreign:
        pieces.keep_alive(takers)
    num_first = len(targets)
    if is_plain:
        targets += [GradientEdge(node, 0) for node in takers]
    else:
        for node, product in zip(takers, products):
            _take_at(node, pieces, product)
        if memory.watch is not None:
            memory.watch.count_own(len(takers))
    values = gradients_of(targets, roots, gradients)
    for leaf, gradient in zip(kept, values):
        pieces.keep(leaf, gradient)
    if is_plain:
        for product, gradient in zip(products, values[num_first:]):
            pieces.put_off(*product, gradient)
    return pieces


def _take_at(node, pieces, product):
    """Take the gradient of a product's output when the engine comes to its node."""

    def take(gradients):
        pieces.put_off(*product, gradients[0])

    node.register_prehook(take)
