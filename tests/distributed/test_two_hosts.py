"""Ranks that only TCP connects: on one host, and on two with delay and loss between them.

Would catch: an address that the other host cannot reach, a wrong answer when packets come late, a
Unix socket assumed where there is none, a report that blames a stage for what the line costs or
the line for what a stage costs.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from free_port import free_port
from two_hosts import DEVICE, HOSTS, TwoHosts

SCRIPT = Path(__file__).with_name("host_rank.py")


def start(rank, count, address, port, transport="auto", wrap=lambda command: command,
          arguments=(), **more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank),
                   "WORLD_SIZE": str(count), "MASTER_ADDR": address, "MASTER_PORT": str(port),
                   **more}
    command = wrap([sys.executable, str(SCRIPT), transport, *arguments])
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def finish(processes):
    """What each said; all are gone afterwards."""
    try:
        ends = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ends):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


def least_disturbed(said):
    """By rank: its line of the step that took least. Elsewhere others may have had the processors,
    which makes of any stage one that others wait for."""
    steps = list(zip(*said, strict=True))
    return min(steps, key=lambda lines: sum(line["wall_s"] for line in lines))


def test_tcp_on_one_host():
    """The first stage sleeps: what the others wait for is not computed yet."""
    port = free_port()
    said = least_disturbed(finish([
        start(rank, 3, "127.0.0.1", port, "tcp", arguments=["slow producer"])
        for rank in range(3)]))
    assert [line["rank"] for line in said] == [0, 1, 2]
    for line in said[1:]:
        assert line["input_s"] > line["transfer_s"], said


def test_interface_that_is_not_there():
    """Every rank names the interface and what there is."""
    port = free_port()
    processes = [start(rank, 2, "127.0.0.1", port, RRFP_SOCKET_IFNAME="nothing0" if rank else "")
                 for rank in range(2)]
    for process in processes:
        errors = process.communicate(timeout=300)[1]
        assert "ValueError: " in errors and '"nothing0" (RRFP_SOCKET_IFNAME)' in errors, errors
        assert "lo 127.0.0.1" in errors


@contextlib.contextmanager
def two_hosts(seed, delay_ms):
    try:
        hosts = TwoHosts(delay_ms=delay_ms, loss=0.01, seed=seed).__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"runs as root where /dev/net/tun is: {error}")
    try:
        yield hosts
    finally:
        hosts.__exit__()


def on_host(hosts, rank, **more):
    return start(rank, 4, HOSTS[0], 29500, GLOO_SOCKET_IFNAME=DEVICE,
                 wrap=lambda command: hosts.command(rank // 2, command), **more)


@pytest.mark.parametrize(
    "interfaces", ["", pytest.param(DEVICE, marks=pytest.mark.slow)]
)
def test_two_hosts_with_delay_and_loss(seed, interfaces):
    """2 x 2 ranks, 30 ms one way and one packet in a hundred lost. The two ranks at the line say
    that they were idle for what was on it, and whose that was; the others waited for those two.
    """
    with two_hosts(seed, delay_ms=30) as hosts:
        said = least_disturbed(finish([
            on_host(hosts, rank, arguments=["large messages"], RRFP_SOCKET_IFNAME=interfaces)
            for rank in range(4)]))
    assert len(said) == 4
    # A microbatch crosses the line there and back.
    assert all(line["wall_s"] > 0.060 for line in said), said
    # One of the two has a half of each round trip as an input that is not computed yet.
    assert (sum(said[rank]["transfer_s"] for rank in (1, 2))
            > sum(said[rank]["input_s"] for rank in (1, 2))), said
    for rank, other in ((1, 2), (2, 1)):
        line = said[rank]
        assert line["transfer_s"] > 0.050, said  # the line's own delay, there and back
        assert line["from"][str(other)] > 0.5 * line["transfer_s"], said
        words = (rf"rank {rank} was idle for [\d.]+ ms \([\d.]+ % of its wall time\) while its "
                 rf"next input was computed and in transfer: [\d.]+ ms from rank {other}")
        assert re.search(words, line["text"]), line["text"]
    for line, at_the_line in ((said[0], said[1]), (said[3], said[2])):
        assert line["input_s"] > line["transfer_s"], said
        assert line["transfer_s"] < 0.5 * at_the_line["transfer_s"], said


def test_line_that_goes_down(seed):
    """Silence is all that tells a host out of reach: every rank says so, in time."""
    silence_s = 4
    with two_hosts(seed, delay_ms=5) as hosts:
        ranks = [on_host(hosts, rank, arguments=["until cut"],
                         RRFP_PEER_TIMEOUT_S=str(silence_s)) for rank in range(4)]
        try:
            for rank in ranks:
                assert rank.stdout.readline() == "training\n", rank.communicate(timeout=180)[1]
            hosts.cut()
        finally:
            said = finish(ranks)
    for line in said:
        assert line["error"] == "PeerLostError", said
        assert "the process is frozen or its host is out of reach" in line["text"], said
        assert line["after_s"] < silence_s + 20, said
