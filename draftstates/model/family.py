"""Which residual streams are captured. Cheap to import: a configuration is read again for every job."""

from collections.abc import Sequence

from draftstates.errors import UserError


def eagle3_layers(num_layers: int) -> tuple[int, int, int]:
    """The three r_k that EAGLE-3 reads by default: k = 2, N//2, N-3.

    Raises:
        UserError: the model has fewer than 7 layers, where these are not three ascending layers.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 2 < layers[1] < layers[2]:
        raise UserError(f"residual_layers: eagle3 needs at least 7 layers, the model has {num_layers}: list the layers instead")
    return layers


def chosen_layers(layers: str | Sequence[int], *, num_layers: int) -> tuple[int, ...]:
    """The configuration's `residual_layers` ("eagle3" or ascending k) as k.

    Raises:
        UserError: layers that a model of `num_layers` does not have.
    """
    if layers == "eagle3":
        return eagle3_layers(num_layers)
    if layers and max(layers) > num_layers:
        raise UserError(f"residual_layers: expected k in 0..{num_layers}, as many layers as the model has, found {list(layers)}")
    return tuple(layers)
