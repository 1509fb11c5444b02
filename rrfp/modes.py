"""The caller's modes, for threads that run stages: torch keeps all of these per thread."""

import contextlib
import copy

import torch
from torch._C import _autograd


class CallerModes:
    """A snapshot of the calling thread: grad and inference mode, autocast, device, hooks.

    ``adopted()`` makes another thread like it for a step, except autocast, which ``autocast()``
    enters for each forward (so that its cache of cast weights ends with the task).
    """

    def __init__(self, forward_only):
        self.inference = torch.is_inference_mode_enabled()
        self.grad = torch.is_grad_enabled() and not forward_only
        self.autocasts = [
            torch.autocast(
                kind,
                dtype=torch.get_autocast_dtype(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        device = torch.get_default_device()
        self.device = None if device == torch.device("cpu") else device
        self.hooks = _autograd._top_saved_tensors_default_hooks(False)

    @contextlib.contextmanager
    def adopted(self, other_thread):
        """Run a step like the caller; ``other_thread`` is False on the caller's own thread."""
        with contextlib.ExitStack() as stack:
            if other_thread:
                stack.enter_context(torch.inference_mode(self.inference))
                if self.device is not None:
                    stack.enter_context(self.device)
                if self.hooks is not None:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            else:
                for autocast in self.autocasts:
                    stack.enter_context(torch.autocast(autocast.device, enabled=False))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield

    def autocast(self):
        """A context with the caller's autocast, or None when it has none."""
        if not self.autocasts:
            return None
        stack = contextlib.ExitStack()
        for autocast in self.autocasts:
            stack.enter_context(copy.copy(autocast))  # an autocast object keeps state while in use
        return stack
