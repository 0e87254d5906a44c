"""Run speculators' own command line, on a CPU too: `train.py train --speculator-type eagle3 ...` is `speculators train ...`.

Its trainer takes an accelerator for granted. Where there is none, the CPU is put in its place; nothing else of it changes.
"""

import sys

import torch


def use_cpu() -> None:
    """Make torch and the trainer name the CPU where they would name an accelerator."""
    torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else torch.device("cpu")
    torch.accelerator.is_available = lambda: False
    torch.accelerator.synchronize = lambda *_: None

    import speculators.train.trainer

    speculators.train.trainer.get_local_rank = lambda: "cpu"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        use_cpu()
    from speculators.__main__ import app

    sys.argv[0] = "speculators"
    app()
