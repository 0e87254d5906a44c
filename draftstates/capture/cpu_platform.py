"""A platform of PyTorch's own operators: SGLang 0.5.23 on any CPU, without compiled CPU kernels.

It serves demonstrations and tests. SGLang activates it on a machine without a GPU alone (entry
point group `sglang.srt.platforms`).
"""


def activate() -> str | None:
    """Return the name of the platform class; None on a machine with a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    return "draftstates.capture.cpu_platform_class.TorchCpuPlatform"
