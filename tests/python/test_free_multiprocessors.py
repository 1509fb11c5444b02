"""Multiprocessors left free for NCCL's kernels: asked of cuBLAS and of cuBLASLt, and taken back.

Would catch: a setting that reaches no product, or that outlives the step; one that no GPU can meet.
"""

import ctypes

import pytest
import torch
from gpu_launch import NUM_GPUS, check_launch, two_gpus

from rrfp import free_multiprocessors
from rrfp.free_multiprocessors import left_free, refuse_too_many
from rrfp.settings import read_settings


class Cublas:
    """What is used of the library; ``target`` is what the handle has."""

    def __init__(self, status=0):
        self.target, self.status = 0, status

    def cublasGetSmCountTarget(self, handle, found):
        found._obj.value = self.target
        return self.status

    def cublasSetSmCountTarget(self, handle, target):
        self.target = target.value if isinstance(target, ctypes.c_int) else target
        return self.status


class Properties:
    multi_processor_count = 132


@pytest.fixture
def cublas(monkeypatch):
    library = Cublas()
    monkeypatch.setattr(free_multiprocessors, "_cublas", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    return library


def test_it_is_asked_for_and_taken_back(cublas):
    with pytest.raises(KeyError), left_free(16):
        assert cublas.target == 116
        assert torch._C._get_sm_carveout_experimental() == 16
        raise KeyError
    assert cublas.target == 0
    assert torch._C._get_sm_carveout_experimental() is None


def test_a_refusal_is_told(cublas):
    cublas.status = 7
    with pytest.raises(RuntimeError, match="status 7"), left_free(16):
        pass
    assert torch._C._get_sm_carveout_experimental() is None


def test_more_than_a_gpu_has_is_refused(cublas):
    refuse_too_many(131, "cuda:0")
    with pytest.raises(ValueError, match="RRFP_FREE_SMS is 132, but cuda:0 has 132"):
        refuse_too_many(132, "cuda:0")


def test_the_setting_is_a_number():
    assert read_settings({}).free_sms == 0
    assert read_settings({"RRFP_FREE_SMS": "24"}).free_sms == 24
    with pytest.raises(ValueError, match="RRFP_FREE_SMS"):
        read_settings({"RRFP_FREE_SMS": "-1"})


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")
def test_products_are_right_and_the_library_is_told():
    a = torch.randn(512, 512, device="cuda", dtype=torch.float64)
    expected = a @ a
    target = ctypes.c_int()
    with left_free(16):
        assert (a @ a - expected).norm() <= 1e-12 * expected.norm()
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        free_multiprocessors._cublas().cublasGetSmCountTarget(handle, ctypes.byref(target))
        assert target.value == torch.cuda.get_device_properties(0).multi_processor_count - 16


@pytest.mark.gpu
@two_gpus
def test_steps_over_nccl_are_right_with_it():
    check_launch(2, "--transport", "nccl", "--steps", "6", RRFP_FREE_SMS="16")
