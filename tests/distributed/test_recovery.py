"""After a rank has died: the process group is rebuilt with a new process, and training goes on."""

import os
import subprocess
import sys
import textwrap

from free_port import free_port

RANK = textwrap.dedent("""
    import os, signal, subprocess, sys
    import torch, torch.distributed as dist
    import rrfp
    rank, port, next_port, is_new = (int(a) for a in sys.argv[1:5])
    torch.set_num_threads(1)
    stage = torch.nn.Linear(4, 4)
    data = [torch.ones(2, 4)] * 4

    def say(text):
        os.write(1, f"{text}\\n".encode())  # at once: both ranks write to one pipe

    def join(port):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}",
                                rank=rank, world_size=2)

    def step():
        return rrfp.run_pipeline(stage, data if rank == 0 else None, data if rank == 1 else None,
                                 torch.nn.functional.mse_loss, stall_timeout_s=60)

    join(next_port if is_new else port)
    if not is_new:
        step()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step()
        except rrfp.PeerLostError as error:
            say(f"lost rank {error.rank}")
        dist.destroy_process_group()
        fresh = subprocess.Popen([sys.executable, "-c", os.environ["RANK_SOURCE"], "1", str(port),
                                  str(next_port), "1"])
        join(next_port)
    step(), step()
    say(f"rank {rank} went on")
    if not is_new:
        assert fresh.wait(60) == 0
""")


def test_training_goes_on_with_a_new_process():
    """The survivor has set up a pipeline before and the newcomer has not: they must still meet."""
    ports = [str(free_port()), str(free_port())]
    environment = {**os.environ, "RANK_SOURCE": RANK}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), *ports, "0"],
                              env=environment, stdout=subprocess.PIPE, text=True)
             for rank in range(2)]
    text = ranks[0].communicate(timeout=300)[0]
    ranks[1].communicate(timeout=10)
    assert ranks[0].returncode == 0, text
    assert sorted(text.splitlines()) == ["lost rank 1", "rank 0 went on", "rank 1 went on"]
