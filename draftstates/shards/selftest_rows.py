"""The rows of every layer that a self-test captured, in one safetensors file.

Of each prompt the file holds the ids, the positions of the kept rows, and these rows of r_0 … r_N
and of what the final norm gives, by the names "r_k" and "post_norm".
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from draftstates.errors import UserError, make_again

if TYPE_CHECKING:
    import torch

_FORMAT = "draftstates.selftest_rows.v1"
_METADATA = "draftstates"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """The kept rows of one prompt.

    Attributes:
        input_ids: int32 [n].
        positions: positions of the m kept rows, ascending, int64 [m].
        states: by name, [m, H] each.
    """

    input_ids: "torch.Tensor"
    positions: "torch.Tensor"
    states: "dict[str, torch.Tensor]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelftestRows:
    """The rows of a self-test.

    Attributes:
        id: identifies the rows, and the servers that agreed with them.
        prompts: the shortest first.
    """

    id: str
    capture_key: str
    prompts: tuple[Prompt, ...]

    def save(self, path: Path) -> None:
        """Write the file, in place."""
        from safetensors.torch import save_file

        tensors = {}
        for number, prompt in enumerate(self.prompts):
            parts = {"input_ids": prompt.input_ids, "positions": prompt.positions}
            for name, tensor in {**parts, **prompt.states}.items():
                tensors[f"{number}.{name}"] = tensor.contiguous()
        head = {"format": _FORMAT, "id": self.id, "capture_key": self.capture_key}
        save_file(tensors, path, metadata={_METADATA: json.dumps(head)})

    @classmethod
    def read(cls, path: Path) -> "SelftestRows":
        """Read the file.

        Raises:
            UserError: it is missing, cut short, or of another format.
        """
        head = _head(path)
        parts: dict[int, dict[str, Any]] = {}
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors file, not a mapping)
                number, _, part = name.partition(".")
                parts.setdefault(int(number), {})[part] = tensors.get_tensor(name)
        return cls(
            id=head["id"],
            capture_key=head["capture_key"],
            prompts=tuple(
                Prompt(
                    input_ids=found.pop("input_ids"),
                    positions=found.pop("positions"),
                    states=found,
                )
                for _, found in sorted(parts.items())
            ),
        )


def read_id(path: Path) -> str:
    """Return the id in a file of self-test rows.

    Raises:
        UserError: the file is missing, cut short, or of another format.
    """
    return _head(path)["id"]


def _head(path: Path) -> dict[str, str]:
    remedy = make_again("to have the server test itself again", path, path.with_name("server.json"))
    try:
        # The header alone is read: a job that extracts loads no torch.
        with safe_open(path, framework="numpy") as tensors:
            head = json.loads((tensors.metadata() or {}).get(_METADATA, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(
            f"{path}: expected the rows of the server's self-test, found {error}; {remedy}"
        ) from error
    if head.get("format") != _FORMAT:
        raise UserError(
            f"{path}: expected rows of a self-test ({_FORMAT}), found {head.get('format')};"
            f" {remedy}"
        )
    return head
