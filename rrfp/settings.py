"""The only reader of ``RRFP_*`` environment variables. Read once, when rrfp is imported."""

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes:
        heartbeat_ms: RRFP_HEARTBEAT_MS. How often a rank says that it is alive.
        peer_timeout_s: RRFP_PEER_TIMEOUT_S. Silence after which a process counts as lost.
        spin_us: RRFP_SPIN_US. How long an idle worker on the CPU looks for its next task before it
            sleeps, and with GPUs the progress thread. None: by the number of cores.
        socket_interfaces: RRFP_SOCKET_IFNAME. Network interfaces at which other hosts reach this
            one, by name or beginning of a name, comma-separated, best first.
        dump_signal: RRFP_DUMP_SIGNAL, such as SIGUSR1: a process that gets it says on stderr what
            its ranks are doing. Default: none.
        guard: RRFP_GUARD. Whether the guard of hint "auto" may return to its order.
        waiting: RRFP_WAITING. Whether hint "auto" may wait for an announced task.
        turns: RRFP_TURNS. Whether ranks that are threads of one process may take turns where tasks
            are short.
        stream_waits: RRFP_STREAM_WAITS. Whether a GPU's stream may wait for a message, so that
            its task is launched before the message is there.
        free_sms: RRFP_FREE_SMS. Multiprocessors that matrix products leave free for messages, where
            GPUs are joined through NCCL.
        close_timeout_s: RRFP_CLOSE_TIMEOUT_S. How long closing waits for what is on its way.
    """

    heartbeat_ms: int = 500
    peer_timeout_s: float = 60.0
    spin_us: int | None = None
    close_timeout_s: float = 5.0
    guard: bool = True
    waiting: bool = True
    turns: bool = True
    stream_waits: bool = True
    free_sms: int = 0
    socket_interfaces: str = ""
    dump_signal: int | None = None


def _number(environment, name, convert, default, least):
    text = environment.get(name)
    if text is None:
        return default
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not value >= least:
        usual = "" if default is None else f", {default}"
        raise ValueError(
            f"{name} is {text!r}; it must be a number of at least {least}. Unset it for the "
            f"default{usual}."
        )
    return value


def _signal(environment, name):
    text = environment.get(name)
    if not text:
        return None
    found = getattr(signal, text, None)
    if not isinstance(found, signal.Signals) or found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(
            f"{name} is {text!r}; it must be the name of a signal that can be caught, such as "
            "SIGUSR1."
        )
    return found


def _switch(environment, name):
    text = environment.get(name, "on")
    if text not in ("on", "off"):
        raise ValueError(f"{name} is {text!r}; it must be on or off. Unset it for on.")
    return text == "on"


def read_settings(environment=os.environ):
    """Settings from the variables of ``environment``."""
    default = Settings()
    return Settings(
        heartbeat_ms=_number(environment, "RRFP_HEARTBEAT_MS", int, default.heartbeat_ms, 1),
        peer_timeout_s=_number(
            environment, "RRFP_PEER_TIMEOUT_S", float, default.peer_timeout_s, 0.1
        ),
        spin_us=_number(environment, "RRFP_SPIN_US", int, default.spin_us, 0),
        close_timeout_s=_number(
            environment, "RRFP_CLOSE_TIMEOUT_S", float, default.close_timeout_s, 0
        ),
        dump_signal=_signal(environment, "RRFP_DUMP_SIGNAL"),
        guard=_switch(environment, "RRFP_GUARD"),
        waiting=_switch(environment, "RRFP_WAITING"),
        turns=_switch(environment, "RRFP_TURNS"),
        stream_waits=_switch(environment, "RRFP_STREAM_WAITS"),
        free_sms=_number(environment, "RRFP_FREE_SMS", int, default.free_sms, 0),
        socket_interfaces=environment.get("RRFP_SOCKET_IFNAME", ""),
    )


SETTINGS = read_settings()
