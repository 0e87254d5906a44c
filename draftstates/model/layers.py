"""The layers that published drafters read, by the formulas of their own code, as k of r_k.

Most of that code numbers layers by the layer that outputs them: its number i is our k = i + 1.
"""

from collections.abc import Mapping, Sequence

from draftstates.errors import UserError


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """Return the three r_k that EAGLE-3 and P-EAGLE read by default: k = 2, N//2, N-3.

    Source: SafeAILab/EAGLE, `eagle/model/modeling_llama_kv.py` (on entry to layers 2, N//2, N-3);
    `set_eagle3_layers_to_capture` of SGLang's `srt/models/llama.py` has the same default.

    Raises:
        UserError: the model has fewer than 7 layers, so that the three do not ascend.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 2 < layers[1] < layers[2]:
        raise UserError(
            f"residual_layers: eagle3 needs at least 7 layers, the model has {num_layers}: list the"
            " layers instead"
        )
    return layers


def dflash_layers(num_layers: int, drafted: int) -> tuple[int, ...]:
    """Return the r_k that a DFlash drafter of `drafted` layers reads, one for each of its layers.

    They are spread evenly over the outputs of layers 1 to N-3, so k = 2 to N-2; a drafter of one
    layer reads the output of layer N//2. Python's round takes halves to the even number, as there.

    Source: `build_target_layer_ids`, first in z-lab/dflash (`model/utils.py`), and the same in
    SGLang (`srt/speculative/dflash_utils.py`), SpecForge (`modeling/draft/dflash.py`) and NeMo
    Automodel (`components/speculative/dflash/draft_qwen3.py`).

    Args:
        num_layers: N.
        drafted: layers of the drafter.

    Raises:
        UserError: the model has fewer different layers.
    """
    first, last = 1, num_layers - 3
    if drafted == 1:
        outputs = [num_layers // 2]
    else:
        outputs = [round(first + i * (last - first) / (drafted - 1)) for i in range(drafted)]
    if last < first or len(set(outputs)) < drafted:
        raise UserError(
            f"residual_layers: dflash with {drafted} layers needs a model of at least"
            f" {drafted + 3} layers, this one has {num_layers}: list the layers instead"
        )
    return tuple(i + 1 for i in outputs)


def chosen_layers(
    layers: str | Mapping[str, int] | Sequence[int], *, num_layers: int
) -> tuple[int, ...]:
    """Return the configuration's `residual_layers` as ascending k.

    Args:
        layers: "eagle3", {"dflash": layers of the drafter}, or the k themselves.
        num_layers: N.

    Raises:
        UserError: the model has too few layers.
    """
    if layers == "eagle3":
        return eagle3_layers(num_layers)
    if isinstance(layers, Mapping):
        return dflash_layers(num_layers, layers["dflash"])
    if layers and max(layers) > num_layers:
        raise UserError(
            f"residual_layers: expected k in 0..{num_layers}, as many layers as the model has,"
            f" found {list(layers)}"
        )
    return tuple(layers)
