"""What run_pipeline keeps of a session between its calls."""

import weakref


class CacheEntry:
    """A session, its modules and process group weakly: when one goes, the session is closed."""

    def __init__(self, session, modules, group):
        self.session = session
        self._group = None if group is None else weakref.ref(group)
        self._modules = {stage: weakref.ref(module) for stage, module in modules.items()}
        for module in modules.values():
            finalizer = weakref.finalize(module, _close_orphan, weakref.ref(session))
            finalizer.atexit = False

    def modules(self, group):
        """``{stage: module}``, or None when the session cannot be used with this group any more."""
        if self._group is not None and self._group() is not group:
            self.session.close("its process group was destroyed")
        modules = {stage: reference() for stage, reference in self._modules.items()}
        return modules if self.is_usable() else None

    def is_usable(self):
        gone = any(reference() is None for reference in self._modules.values())
        return self.session.closed_because is None and not gone


def _close_orphan(session_reference):
    session = session_reference()
    if session is not None:
        session.close("a stage was deleted")
