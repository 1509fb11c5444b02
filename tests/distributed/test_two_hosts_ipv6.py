"""Two hosts that know each other by IPv6 alone.

Would catch: an address without its brackets, a family that is taken for granted.
"""

import subprocess

import pytest
from test_two_hosts import finish, start
from two_hosts import DEVICE, HOSTS_OF_IPV6, TwoHosts


def test_two_hosts_over_ipv6(seed):
    """2 ranks on each, 1 ms one way."""
    try:
        hosts = TwoHosts(1, 0, seed, HOSTS_OF_IPV6).__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"runs as root where /dev/net/tun is, and a kernel with IPv6: {error}")
    try:
        said = finish([
            start(rank, 4, HOSTS_OF_IPV6[0], 29500, GLOO_SOCKET_IFNAME=DEVICE,
                  wrap=lambda command, host=rank // 2: hosts.command(host, command))
            for rank in range(4)
        ])
    finally:
        hosts.__exit__()
    assert [steps[-1]["rank"] for steps in said] == [0, 1, 2, 3]
