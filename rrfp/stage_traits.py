"""What a stage was seen to do in earlier steps; a deterministic step must know it beforehand.

Nothing is taken for granted: until a training step has shown better, a stage counts as one whose
backward cannot be split and, if it has buffers, whose forward changes them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageTraits:
    """Of one stage; picklable, so that ranks can tell one another.

    Attributes:
        is_fused: Its backward cannot be split, or nobody has seen it split yet.
        changes_buffers: Its forward changes buffers (BatchNorm), or might.
    """

    is_fused: bool
    changes_buffers: bool


class TraitsMemory:
    """The traits of the stages of this process, for as long as they keep their modes."""

    def __init__(self):
        self._known = {}  # stage -> (modes, StageTraits)

    def traits(self, stage, module):
        """What is known of the stage as it is now."""
        modes = _modes(module)
        known_modes, traits = self._known.get(stage, (None, None))
        if known_modes != modes:
            has_buffers = any(True for _ in module.buffers())
            traits = StageTraits(is_fused=True, changes_buffers=has_buffers)
            self._known[stage] = (modes, traits)
        return traits

    def learn(self, stage, is_fused, changes_buffers):
        """After a training step of the stage; None keeps what was known."""
        modes, traits = self._known[stage]
        if is_fused is None:
            is_fused = traits.is_fused
        if changes_buffers is None:
            changes_buffers = traits.changes_buffers
        self._known[stage] = (modes, StageTraits(is_fused, changes_buffers))


class BufferWatch:
    """Whether forwards change buffers of a module, in place or by new ones."""

    def __init__(self, module):
        self._module = module
        self._before = self._state()
        self.has_changed = False

    def look(self):
        """After a forward."""
        if not self.has_changed and self._before:
            self.has_changed = self._state() != self._before

    def _state(self):
        # The buffers are held, so that no other object takes over the identity of one.
        self._held = list(self._module.buffers())
        return [(id(b), -1 if b.is_inference() else b._version) for b in self._held]


def _modes(module):
    """What decides about a stage's traits besides its code."""
    return (
        tuple(part.training for part in module.modules()),
        tuple(parameter.requires_grad for parameter in module.parameters()),
    )
