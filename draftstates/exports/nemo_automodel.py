"""Export for NeMo Automodel 0.7: its offline cache of EAGLE-3, as `precompute_eagle3` writes it.

The cache has `manifest.json`, `target_embeddings.safetensors`, and one `shard-{number}.safetensors`
for every 256 samples, all of which are padded to `seq_length` tokens. A file holds, of n samples:

| tensor | dtype, shape |
| --- | --- |
| `input_ids`, `attention_mask`, `loss_mask` | int64 [n, S] |
| `aux_hidden_states` | [n, S, 3 H] |
| `position_mask` | bool [n, S, 1]: supervised, and the target model's token is in the vocabulary |
| `target_probs` | [n, S, D]: the target model's probabilities of the drafter's vocabulary |
| `target_probs_values`, `_indices` | instead, the k largest and their int32 places, [n, S, k] |

All but the states and `attention_mask` are shifted by one token, as the trainer shifts them: row t
has the id of token t+1 and the probabilities of the token behind it. A row without such a token has
equal probabilities, and no loss reads it. The probabilities are computed from the final state and
the head in float32; the trainer's own script computes them in the model's number format.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftstates.errors import UserError
from draftstates.exports.builder import Builder
from draftstates.exports.common import Options, cast, check_equal, summary
from draftstates.exports.vocabulary import TokenCounts, draft_vocabulary
from draftstates.model import family
from draftstates.model.head import Head, read_head
from draftstates.shards.dataset import ShardDataset
from draftstates.shards.layout import safetensors_header

_VERSION = 2
_PER_SHARD = 256
# rows whose logits are computed at a time
_ROWS = 1024
_DTYPES = {torch.bfloat16: ("bf16", "BF16"), torch.float16: ("fp16", "F16")}
_DTYPES[torch.float32] = ("fp32", "F32")


def export(dataset: ShardDataset, builder: Builder, options: Options) -> dict:
    """Write the dataset's samples into the builder, and return the content of `export.json`."""
    cache = _Cache(dataset, options)
    for first in range(0, len(dataset), _PER_SHARD):
        cache.add_shard(builder, range(first, min(first + _PER_SHARD, len(dataset))))
    embeddings = builder.partial / "target_embeddings.safetensors"
    weight = {"weight": cache.embeddings()}
    save_file(weight, embeddings)
    check_equal(embeddings, load_file(embeddings), weight)
    manifest = json.dumps(cache.manifest(), indent=2, sort_keys=True)
    (builder.partial / "manifest.json").write_text(manifest)
    builder.include(embeddings.name, "manifest.json")
    return summary(dataset, options, aux_layer_ids=dataset.layer_numbers)


class _Cache:
    """The cache of a dataset: its sizes, and each sample as its files hold it."""

    def __init__(self, dataset: ShardDataset, options: Options) -> None:
        if options.model is None:
            raise UserError(
                "nemo_automodel needs the captured model's folder, for the head and the embeddings"
            )
        self.dataset, self.options = dataset, options
        longest = int(dataset.lengths.max())
        self.length = options.seq_length or longest
        if longest > self.length:
            i = int(dataset.lengths.argmax())
            raise UserError(
                f"seq_length: expected at least {longest:,}, the tokens of sample"
                f" {dataset.sample_id(i)}, found {self.length:,}"
            )
        counts = TokenCounts(options.model.vocab_size)
        for i in range(len(dataset)):
            counts.add(dataset.sample_id(i), *dataset.tokens(i))
        size = options.draft_vocab_size or options.model.vocab_size
        mapping = draft_vocabulary(counts.counts, draft_size=size)
        self.selected = torch.from_numpy(mapping.t2d).nonzero().flatten()
        topk = options.target_probs_topk or 0
        # as the trainer's reader decides it
        self.topk = topk if topk < size else 0
        self.dtype = options.dtype or dataset.capture.torch_dtype
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._head: Head = read_head(options.model, final_norm="post_norm")
        self._weight = self._head.weight.float().to(self._device)

    def manifest(self) -> dict:
        """Return the content of the cache's `manifest.json`."""
        capture = self.dataset.capture
        return {
            "format_version": _VERSION,
            "target_model": self.options.target_model or capture.model,
            "target_vocab_size": len(self._weight),
            "draft_vocab_size": len(self.selected),
            "seq_length": self.length,
            "dtype": _DTYPES[self.dtype][0],
            "num_samples": len(self.dataset),
            "shard_size": _PER_SHARD,
            "target_probs_topk": self.topk,
            "aux_hidden_dim": capture.hidden_size * len(self.dataset.residual_layers),
            "aux_layer_ids": self.dataset.layer_numbers,
            "selected_token_ids": self.selected.tolist(),
            "input_data": f"draftstates capture {capture.key}",
            "split": None,
            "shuffle_seed": 0,
            # the trainer refuses a recipe with other values; the masks are the capture's
            "mask_reasoning_content": False,
            "mask_generation_prompt": False,
        }

    def embeddings(self) -> torch.Tensor:
        """Return the embeddings of the target model, from which the drafter's begin."""
        weight = self.options.model.tensor(family.EMBEDDING_NAMES)
        if weight is None or not weight.is_floating_point():
            raise UserError(
                f"{self.options.model.path}: expected the embeddings in a floating-point format,"
                f" found {'none' if weight is None else weight.dtype}"
            )
        return weight.float().contiguous()

    def add_shard(self, builder: Builder, samples: range) -> None:
        """Add the file of some consecutive samples to the builder."""
        named = [self.dataset.content(i) for i in samples]
        named += [str(self.length), str(self.topk), str(self.dtype), str(self.selected.tolist())]
        content = hashlib.sha256("\n".join(named).encode()).hexdigest()
        number = samples.start // _PER_SHARD
        name = f"shard-{number:06d}.safetensors"
        builder.add(
            name,
            content,
            lambda path: self._write(path, samples),
            lambda path: self._check(path, samples),
        )

    def _write(self, path: Path, samples: range) -> None:
        header, at, _ = safetensors_header(self._shapes(len(samples)), {})
        with open(path, "wb") as file:
            file.write(header)
            for i in samples:
                for name, tensor in self._sample(i).items():
                    file.seek(at[name])
                    at[name] += file.write(tensor.view(torch.uint8).numpy().tobytes())

    def _check(self, path: Path, samples: range) -> None:
        with safe_open(path, framework="pt") as file:
            for place, i in enumerate(samples):
                found = {name: file.get_slice(name)[place] for name in file.keys()}  # noqa: SIM118
                check_equal(path, found, self._sample(i))

    def _shapes(self, samples: int) -> dict[str, tuple[str, list[int]]]:
        """Return number format and shape of each tensor of a file, in its order."""
        rows, code = [samples, self.length], _DTYPES[self.dtype][1]
        states = self.dataset.capture.hidden_size * len(self.dataset.residual_layers)
        shapes = {
            "input_ids": ("I64", rows),
            "attention_mask": ("I64", rows),
            "loss_mask": ("I64", rows),
            "aux_hidden_states": (code, [*rows, states]),
            "position_mask": ("BOOL", [*rows, 1]),
        }
        if self.topk:
            shapes["target_probs_values"] = (code, [*rows, self.topk])
            shapes["target_probs_indices"] = ("I32", [*rows, self.topk])
        else:
            shapes["target_probs"] = (code, [*rows, len(self.selected)])
        return shapes

    def _sample(self, i: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a sample by name, padded to [S, ...]."""
        found = self.dataset[i]
        tokens = len(found["input_ids"])
        final = found.pop("target_hidden_state")
        found["aux_hidden_states"] = cast(found["aux_hidden_states"], self.options)
        padded = {name: self._padded(tensor) for name, tensor in found.items()}
        probabilities = torch.full((self.length, len(self.selected)), 1 / len(self.selected))
        supervised = padded["loss_mask"].bool()
        for rows, logits in self._logits(final[: tokens - 1]):
            inside = torch.isin(logits.argmax(-1), self.selected)
            supervised[rows] &= inside
            probabilities[rows] = logits[:, self.selected].softmax(-1)
        padded["position_mask"] = supervised[:, None]
        if not self.topk:
            return padded | {"target_probs": probabilities.to(self.dtype)}
        best = probabilities.topk(self.topk, dim=-1)
        values = best.values / best.values.sum(-1, keepdim=True)
        padded["target_probs_values"] = values.to(self.dtype)
        return padded | {"target_probs_indices": best.indices.to(torch.int32)}

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.new_zeros((self.length, *tensor.shape[1:]))
        whole[: len(tensor)] = tensor
        return whole

    def _logits(self, final: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the logits of final states [n, H], some rows at a time, float32 [m, V]."""
        for first in range(0, len(final), _ROWS):
            rows = slice(first, min(first + _ROWS, len(final)))
            inputs = self._head.inputs(final[rows]).to(self._device)
            yield rows, self._head.form(inputs @ self._weight.T).cpu()
