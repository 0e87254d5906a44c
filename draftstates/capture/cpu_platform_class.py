"""The platform class that `cpu_platform.activate` names."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU that computes with PyTorch's native attention."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Return the attention of PyTorch's own operators."""
        return "torch_native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Return False: pinned memory serves copies to a GPU."""
        return False
