"""Multiprocessors (SMs) that matrix products leave free for messages that are kernels, NCCL's.

A product that fills the GPU lets no such kernel start before it ends, on the sender and on the
receiver. cuBLAS can be told to use fewer SMs; what it then does depends on the product and the
card, so the price is for the user to measure (``benchmarks/gpu/gemm_slowdown.py --free``). Copies
between GPUs of one host (``ipc``) need no SM.
"""

import contextlib
import ctypes
from functools import cache

import torch


def refuse_too_many(count, device):
    """Check RRFP_FREE_SMS against a GPU.

    Raises:
        ValueError: No SM would be left for the products.
    """
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if count >= num_sms:
        raise ValueError(
            f"RRFP_FREE_SMS is {count}, but {device} has {num_sms} multiprocessors; leave most of "
            "them to the products."
        )


@contextlib.contextmanager
def left_free(count):
    """Products that this thread launches on its current GPU leave ``count`` SMs free.

    It holds for cuBLAS's, by this thread, and for cuBLASLt's (a layer with a bias) by any thread of
    the process; not for kernels of others, such as Triton's.

    Raises:
        RuntimeError: cuBLAS refuses.
    """
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    cublas = _cublas()
    target_before, carveout_before = ctypes.c_int(), torch._C._get_sm_carveout_experimental()
    _check(cublas.cublasGetSmCountTarget(handle, ctypes.byref(target_before)))
    _check(cublas.cublasSetSmCountTarget(handle, num_sms - count))
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(carveout_before)
        cublas.cublasSetSmCountTarget(handle, target_before)


@cache
def _cublas():
    """The library that torch has loaded."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if "/libcublas.so" in f"/{path}":
                return ctypes.CDLL(f"/{path}")
    raise RuntimeError("RRFP_FREE_SMS needs cuBLAS, and torch has not loaded libcublas.so.")


def _check(status):
    if status != 0:
        raise RuntimeError(f"cuBLAS did not take the number of multiprocessors (status {status}).")
