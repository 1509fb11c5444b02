"""What this build can do."""

from rrfp import _C


def build_info():
    """Return what was built: version, compiler, build type, sanitizer, and whether CUDA is in.

    ``nvtx`` is the folder of the headers that ranges for profilers were built with; "" without.
    ``torch`` is the version found at run time; the core itself does not link it.
    """
    import torch

    return {**_C.build_info(), "torch": torch.__version__}
