"""Tiny random models of a family: SGLang's states on the CPU against Hugging Face's.

`python tests/server/family_runs.py NAME...` prints a line of JSON for each name. No server is
started. Imports take most of the time, so they are made once and each family runs in a fork of its
own: SGLang holds one model in a process.
"""

import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from array import array
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TQDM_DISABLE": "1",
    # Kernels that have no other form run in the interpreter.
    "TRITON_INTERPRET": "1",
}

import torch  # noqa: E402
from families import FAMILIES, VOCABULARY, Family  # noqa: E402

from draftstates.capture import load_audit, mla_cpu  # noqa: E402
from draftstates.capture.every_layer import row_distances  # noqa: E402
from draftstates.capture.kinds import check_logits, unreachable  # noqa: E402
from draftstates.capture.load_audit import Findings, LoadAudit  # noqa: E402
from draftstates.capture.own_capture import OwnCapture  # noqa: E402
from draftstates.capture.stack import find_stack, first  # noqa: E402
from draftstates.capture.taps import Taps  # noqa: E402
from draftstates.errors import UserError  # noqa: E402
from draftstates.extract.protocol import SELF_TEST, Destination  # noqa: E402
from draftstates.model import family as conventions  # noqa: E402
from draftstates.model.digest import capture_spec  # noqa: E402
from draftstates.model.final_norm import FinalNorm  # noqa: E402
from draftstates.model.folder import ModelFolder  # noqa: E402
from draftstates.model.head import read_head  # noqa: E402
from draftstates.shards.selftest_rows import Prompt, SelftestRows  # noqa: E402
from draftstates.verify.parity.check import Asked, check_parity  # noqa: E402

_LENGTHS = (9, 40)
_SECONDS = 120
# Written into every state's slot, whatever the layers that are captured.
_CAPTURED = (1, 2)


def make_model(family: Family, folder: Path) -> Any:
    """Write a random model to `folder` and return it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.model_type, **family.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name.lower():
            # Ones would hide a norm that is left out, or applied twice.
            torch.nn.init.normal_(parameter, mean=family.norm_mean, std=0.3)
        elif name.endswith("bias"):
            # Zeros would hide a bias that is left out.
            torch.nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **family.written}))
    return model


@torch.inference_mode()
def reference(model: Any, samples: list[torch.Tensor], text: dict) -> list[dict[str, torch.Tensor]]:
    """Return each sample's r_0 … r_N and `post_norm`, [n, H] each, from Hugging Face's model."""
    count = text["num_hidden_layers"]
    stack = find_stack(model, num_layers=count, hidden_size=text["hidden_size"])
    seen: dict[str, torch.Tensor] = {}

    def enter(k: int) -> Any:
        def hook(module: object, args: tuple, kwargs: dict) -> None:
            seen[f"r_{k}"] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return hook

    def leave(module: object, args: tuple, output: object) -> None:
        seen[f"r_{count}"], seen["post_norm"] = args[0][0].clone(), first(output)[0].clone()

    hooks = [
        layer.register_forward_pre_hook(enter(k), with_kwargs=True)
        for k, layer in enumerate(stack.layers)
    ]
    hooks += [norm.register_forward_hook(leave) for norm in stack.norms.values()]
    found = []
    for ids in samples:
        seen.clear()
        logits = model(input_ids=ids[None], use_cache=False).logits
        found.append({**seen, "logits": logits[0, -1].float()})
    for hook in hooks:
        hook.remove()
    return found


def start_runner(folder: Path) -> tuple[Any, Findings]:
    """Load the model as SGLang's server does; return its runner, and what it read and filled."""
    from sglang.benchmark import one_batch
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    audit, load = LoadAudit(None), DefaultModelLoader.load_weights_and_postprocess
    audit._active = True
    DefaultModelLoader.load_weights_and_postprocess = staticmethod(
        functools.partial(audit.around_load_weights, load)
    )

    # The server's plug-in registers it too.
    mla_cpu.register()
    load_plugins()
    args = ServerArgs(
        model_path=str(folder),
        dtype="float32",
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        max_total_tokens=1024,
        max_running_requests=8,
        mem_fraction_static=0.3,
        cuda_graph_backend_prefill="disabled",
        cuda_graph_backend_decode="disabled",
    )
    one_batch.get_tokenizer = lambda *args, **kwargs: None
    rank = one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0)
    ranks = one_batch.SpawnRanks(world_rank=rank, gpu_id=0)
    one_batch.publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    runner = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)[0]
    return runner, audit._found


def extend(runner: Any, samples: list[torch.Tensor]) -> None:
    """Prefill the samples in one batch, as requests of the self-test."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    requests = []
    for index, ids in enumerate(samples):
        destination = Destination(
            file="none",
            first_row=0,
            rows=len(ids),
            ids_hash="none",
            attempt=str(index),
            kind=SELF_TEST,
        )
        request = Req(
            rid=destination.rid,
            origin_input_text="",
            origin_input_ids=array("q", ids.tolist()),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = len(ids)
        requests.append(request)
    runner.extend(requests)


def run(name: str, work: Path) -> dict[str, Any]:
    """Compare one family; return its largest distance of a row by state, and of the logits."""
    from sglang.srt.runtime_context import get_parallel

    family = FAMILIES[name]
    folder = work / name
    model = make_model(family, folder)
    opened = ModelFolder(folder)
    text = opened.text
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in _LENGTHS]
    expected = reference(model, samples, text)
    runner, loaded = start_runner(folder)
    if said := load_audit.faults(loaded, opened):
        raise RuntimeError("; ".join(said))
    inner = runner.torch_runner
    taps = Taps(
        inner.model,
        layers=_CAPTURED,
        num_layers=opened.num_layers,
        hidden_size=opened.hidden_size,
        dtype=torch.float32,
        final_norm="post_norm",
    )
    assert not list(unreachable(inner, get_parallel()))
    own = OwnCapture(inner.model, list(_CAPTURED))
    check_logits(inner.model, conventions.logits(text))
    seen = {}
    processor = next(
        module for module in inner.model.modules() if type(module).__name__ == "LogitsProcessor"
    )
    call = processor.forward

    def forward(ids: object, hidden: torch.Tensor, *args: object, **kwargs: object) -> object:
        seen["final"] = hidden.clone()
        seen["reading"] = taps.take(len(hidden))
        seen["aux"] = args[2] if len(args) > 2 else kwargs.get("aux_hidden_states")
        result = seen["result"] = call(ids, hidden, *args, **kwargs)
        return result

    processor.forward = forward
    extend(runner, samples)
    reading, final = seen["reading"], seen["final"]
    if reading.error:
        raise RuntimeError(reading.error)
    distances: dict[str, float] = {}
    for index, ids in enumerate(samples):
        at = sum(_LENGTHS[:index])
        rows = slice(at, at + len(ids))
        want = expected[index]
        for k in range(opened.num_layers + 1):
            found = row_distances(reading.every[k][rows], want[f"r_{k}"]).max().item()
            distances[f"r_{k}"] = max(found, distances.get(f"r_{k}", 0))
        normed = want["post_norm"] * conventions.final_scale(text)
        norm = row_distances(final[rows], normed).max().item()
        distances["post_norm"] = max(norm, distances.get("post_norm", 0))
        there, here = seen["result"].next_token_logits[index].float(), want["logits"]
        head = ((there - here[: len(there)]).norm() / here.norm()).item()
        distances["logits"] = max(head, distances.get("logits", 0))
    for k in _CAPTURED:
        assert torch.equal(reading.state(k), reading.every[k])
    scale = conventions.final_scale(text)
    normed = taps.normed(reading.every[opened.num_layers]) * scale
    distances["norm(r_N)"] = row_distances(normed, final).max().item()
    distances |= from_files(opened, reading.every, final, samples, seen["result"])
    distances |= {
        f"own capture of r_{k}": row_distances(rows, reading.every[k]).max().item()
        for k, rows in own.states(seen["aux"], width=opened.hidden_size).items()
    }
    neighbours = min(
        row_distances(expected[1][f"r_{k}"], expected[1][f"r_{k + 1}"]).median().item()
        for k in range(opened.num_layers)
    )
    rows = slice(_LENGTHS[0], sum(_LENGTHS))
    states = {f"r_{k}": reading.every[k][rows] for k in reading.every}
    parity = by_parity(opened, samples[1], {**states, "post_norm": final[rows]})
    return {
        "distances": distances,
        "neighbours": neighbours,
        "own": own.reason,
        "parity": parity,
    }


def by_parity(model: ModelFolder, ids: torch.Tensor, states: dict[str, torch.Tensor]) -> str:
    """Return what a run's own comparison with the checkpoint says of a prompt's rows."""
    section = {"residual_layers": list(_CAPTURED), "final_norm": "post_norm"}
    dtypes = {"stored_dtype": "float32", "compute_dtype": "float32"}
    spec = capture_spec(model, name=None, capture={**section, **dtypes})
    prompt = Prompt(input_ids=ids.int(), positions=torch.arange(len(ids)), states=states)
    rows = SelftestRows(id="rows", capture_key=spec.key, prompts=(prompt,))
    asked = Asked(tokens=256, layers=None, code="0")
    try:
        return check_parity(rows, spec=spec, model=model, asked=asked).result
    except UserError as error:
        return str(error)


def from_files(
    model: ModelFolder, states: dict, final: torch.Tensor, samples: list[torch.Tensor], result: Any
) -> dict[str, float]:
    """Return how far r_0, the final state and the logits are from what our reading of files gives.

    Args:
        states: r_k by k, [tokens, H].
        final: the final states, [tokens, H].
    """
    found = {}
    scale = conventions.embedding_scale(model.text)
    if scale is not None:
        table = model.tensor(conventions.EMBEDDING_NAMES)
        found["embedding"] = row_distances(states[0], table[torch.cat(samples)] * scale)
    if conventions.has_known_norm(model.text):
        norm = FinalNorm.from_model(model)
        found["formula of the norm"] = row_distances(norm(states[model.num_layers]), final)
    head, last = read_head(model, final_norm="post_norm"), torch.tensor(_LENGTHS).cumsum(0) - 1
    logits = head.logits(head.inputs(final[last]), dtype=torch.float32)
    there = result.next_token_logits[:, : logits.shape[1]].float()
    found["head"] = row_distances(logits, there)
    return {name: distances.max().item() for name, distances in found.items()}


def main(names: list[str]) -> None:
    import sglang.benchmark.one_batch  # noqa: F401
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp())
    for name in names:
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reads)
            log = os.open(work / f"{name}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            signal.alarm(_SECONDS)
            try:
                result = run(name, work)
            except BaseException as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            os.write(writes, json.dumps(result).encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads, "rb") as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        result = json.loads(text) if text else {"error": "the process ended"}
        print(json.dumps({"name": name, **result}), flush=True)
        if "error" in result and os.environ.get("FAMILY_LOGS"):
            shutil.copy(work / f"{name}.log", os.environ["FAMILY_LOGS"])
    shutil.rmtree(work)


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
