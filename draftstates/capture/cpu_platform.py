"""SGLang 0.5.23 on any CPU, without its compiled CPU kernels: a platform of PyTorch's own operators.

For demonstrations and tests. Activated by SGLang only where there is no GPU (entry point group `sglang.srt.platforms`).
"""


def activate() -> str | None:
    """Name of the platform class, or None where a GPU makes it needless."""
    import torch

    if torch.cuda.is_available():
        return None
    return "draftstates.capture.cpu_platform_class.TorchCpuPlatform"
