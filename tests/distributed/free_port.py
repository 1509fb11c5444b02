"""Ports for processes that are to meet, on a machine where other tests run as well."""

import random
import socket

# Below those that Linux gives to outgoing connections, any of which could take one before it is
# listened on.
PORTS = range(10_000, 32_000)


def free_port():
    """A TCP port of 127.0.0.1 on which nobody listens; drawn, so that neighbours draw others."""
    draw = random.SystemRandom()  # not the generator that tests seed
    for _ in range(100):
        with socket.socket() as probe:
            port = draw.choice(PORTS)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port among 100 drawn from {PORTS}")
