"""The decoder layers of a loaded model, and the norms that may be its final norm.

No family's names are written down: the layers are the one list of N modules that is no tower of
images or sound, and the final norm is the last norm that runs after them.
"""

import dataclasses
import inspect
import re

import torch

# Parts of a loaded model that are no part of its language model, or hold a second one.
_SIDE_PARTS = re.compile(
    r"(^|[._])(vision|visual|audio|vit|tower|speech|image|video|mtp|nextn|draft)", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Stack:
    """The part of a model that computes its residual stream.

    Attributes:
        layers: the N decoder layers.
        norms: norms beside the layers, by name; the final norm is the one that runs last.
    """

    layers: list[torch.nn.Module]
    norms: dict[str, torch.nn.Module]


def find_stack(model: torch.nn.Module, *, num_layers: int, hidden_size: int) -> Stack:
    """Find the decoder layers and the norms beside them.

    Args:
        model: the loaded model, perhaps with towers of images or sound.
        num_layers: N.
        hidden_size: H.

    Raises:
        SystemExit: the model has no such list of layers, or several, or no norm beside it.
    """
    modules = dict(model.named_modules())
    lists: list[str] = []
    for name, module in modules.items():
        if (
            isinstance(module, torch.nn.ModuleList)
            and len(module) == num_layers
            and all(len(list(layer.children())) > 1 for layer in module)
            and not _SIDE_PARTS.search(name)
            # Experts of a layer, for example, may be N as well.
            and not any(name.startswith(f"{other}.") for other in lists)
        ):
            lists.append(name)
    if len(lists) > 1:
        # Layers of an encoder are given no batch.
        lists = [name for name in lists if _takes_a_batch(modules[name][0])]
    kind = type(model).__name__
    if len(lists) != 1:
        raise SystemExit(
            f"draftstates: {kind}: expected one list of {num_layers} decoder layers, found"
            f" {', '.join(lists) or 'none'}: its residual stream cannot be captured"
        )
    norms = _norms_beside(modules, lists[0], hidden_size)
    if not norms:
        raise SystemExit(
            f"draftstates: {kind}: expected a final norm beside {lists[0]}, found no norm of"
            f" {hidden_size} values: r_{num_layers} cannot be captured"
        )
    return Stack(layers=list(modules[lists[0]]), norms=norms)


def _takes_a_batch(layer: torch.nn.Module) -> bool:
    parameters = inspect.signature(layer.forward).parameters.values()
    return any(each.name == "forward_batch" or each.kind is each.VAR_KEYWORD for each in parameters)


def _norms_beside(
    modules: dict[str, torch.nn.Module], layers: str, hidden_size: int
) -> dict[str, torch.nn.Module]:
    """Return the norms in the nearest module around `layers` that has any."""
    around = layers
    while around:
        around = around.rpartition(".")[0]
        prefix = f"{around}." if around else ""
        found = {
            name: module
            for name, module in modules.items()
            if name.startswith(prefix)
            and not name.startswith(f"{layers}.")
            and not _SIDE_PARTS.search(name)
            and _is_norm(module, hidden_size)
        }
        if found:
            return found
    return {}


def _is_norm(module: torch.nn.Module, hidden_size: int) -> bool:
    if "norm" not in type(module).__name__.lower():
        return False
    weight = getattr(module, "weight", None)
    # OLMo's norm has no weight.
    shape = getattr(module, "normalized_shape", None) if weight is None else weight.shape
    return shape is not None and tuple(shape) == (hidden_size,)


@torch.no_grad()
def adds_its_residual(norm: torch.nn.Module) -> bool:
    """Return whether a norm, called with a residual, norms the sum.

    It is tried on two rows. Cohere's norm takes a residual and hands it on unread.
    """
    weight = getattr(norm, "weight", None)
    if weight is None:
        return False
    generator = torch.Generator().manual_seed(0)
    hidden, residual = (
        torch.randn(2, len(weight), generator=generator).to(weight.device, weight.dtype)
        for _ in range(2)
    )
    try:
        both = first(norm(hidden.clone(), residual.clone()))
    # Norms of other classes refuse a second argument, each in its own way.
    except Exception:
        return False
    alone, summed = first(norm(hidden.clone())), first(norm(hidden + residual))
    return bool((both - summed).float().norm() < (both - alone).float().norm())


def first(output: object) -> torch.Tensor:
    """Return the normed rows of a norm's output: some norms return the residual beside them."""
    return output[0] if isinstance(output, tuple) else output
