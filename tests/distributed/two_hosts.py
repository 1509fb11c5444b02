"""Two hosts on one machine: network namespaces that see each other through a slow, lossy line. The
second one's monotonic clock is ten hours ahead (a time namespace), where the system can do that.

The line is this process: it holds the far ends of two TUN devices and carries packets from one to
the other, late, and drops some. Needs root. Run as a script it is the line alone.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_CLONE_NEWNET = 0x40000000
DEVICE = "line0"
HOSTS = ("10.213.7.1", "10.213.7.2")
HOSTS_OF_IPV6 = ("fd21:3::1", "fd21:3::2")


def _run(*command):
    subprocess.run(command, check=True, capture_output=True)


class TwoHosts:
    """Context manager. ``command(host, arguments)`` runs in host 0 or 1."""

    def __init__(self, delay_ms, loss, seed, addresses=HOSTS):
        self.addresses = addresses
        self.names = [f"rrfp-{os.getpid()}-{host}" for host in range(2)]
        self._line_arguments = [str(delay_ms), str(loss), str(seed)]

    def __enter__(self):
        self._clock = ["unshare", "--time", "--monotonic", "36000", "--fork", "--kill-child"]
        try:
            _run(*self._clock, "true")
        except (OSError, subprocess.CalledProcessError):
            self._clock = []
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            self._line = subprocess.Popen(
                [sys.executable, __file__, *self.names, *self._line_arguments],
                stdout=subprocess.PIPE,
            )
            if self._line.stdout.readline() != b"ready\n":
                raise OSError("no TUN devices")
            for name, address in zip(self.names, self.addresses):
                inside = ("ip", "netns", "exec", name, "ip")
                length = ["64", "nodad"] if ":" in address else ["24"]
                _run(*inside, "addr", "add", f"{address}/{length[0]}", "dev", DEVICE, *length[1:])
                _run(*inside, "link", "set", DEVICE, "up")
                _run(*inside, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError):
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        if hasattr(self, "_line"):
            self._line.kill()
            self._line.wait()
            self._line.stdout.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def cut(self):
        """No packet gets through any more."""
        self._line.kill()

    def command(self, host, arguments):
        clock = self._clock if host == 1 else []
        return ["ip", "netns", "exec", self.names[host], *clock, *arguments]


def _open_tun(namespace):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


def _carry(namespaces, delay_s, loss, seed):
    draw = random.Random(seed)
    ends = [_open_tun(namespace) for namespace in namespaces]
    print("ready", flush=True)
    under_way, number = [], 0  # (when due, number, end, packet)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait_s)[0]:
            packet = os.read(end, 65536)
            if draw.random() >= loss:
                number += 1
                other = ends[1 - ends.index(end)]
                heapq.heappush(under_way, (time.monotonic() + delay_s, number, other, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(under_way)
            try:
                os.write(end, packet)
            except OSError:
                pass  # the device is not up yet, or full: one more loss


if __name__ == "__main__":
    _carry(sys.argv[1:3], float(sys.argv[3]) / 1000, float(sys.argv[4]), int(sys.argv[5]))
