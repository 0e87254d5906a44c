"""speculators' own command line, on a CPU too: `train.py train --speculator-type eagle3 ...` is
`speculators train ...`.

Its trainer takes an accelerator for granted. On a machine without one, this script puts the CPU in
its place and changes nothing else.
"""

import sys

import torch


def use_cpu() -> None:
    """Have torch and the trainer name the CPU in place of an accelerator."""
    torch.accelerator.current_accelerator = lambda check_available=False: (
        None if check_available else torch.device("cpu")
    )
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
