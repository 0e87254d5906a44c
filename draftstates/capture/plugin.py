"""Entry point of the SGLang plug-in: it checks every seam that capture rests on, then hooks two.

SGLang logs an exception in a plug-in and starts without it. A server that captures nothing must not
start, so a seam that has moved ends the process instead (SGLang does not catch `SystemExit`).
"""

import inspect
import pkgutil
import sys
from pathlib import Path

from draftstates.capture.settings import CaptureSettings
from draftstates.errors import UserError
from draftstates.model.digest import model_digest
from draftstates.model.folder import ModelFolder
from draftstates.spec import CaptureSpec

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
LOAD_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
LOGITS_OUTPUT = "sglang.srt.layers.logits_processor.LogitsProcessorOutput"
PARALLEL = "sglang.srt.runtime_context.get_parallel"
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
GRAPHS = "sglang.srt.model_executor.cuda_graph_config.check_cuda_graph_backend"
WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
LOGITS_PARAMETERS = (
    "input_ids",
    "hidden_states",
    "lm_head",
    "logits_metadata",
    "aux_hidden_states",
)
FORWARD_BATCH_FIELDS = (
    "rids",
    "extend_prefix_lens_cpu",
    "extend_seq_lens_cpu",
    "input_ids",
    "forward_mode",
)


def register() -> None:
    """Check and hook SGLang, which calls this function in each of its processes.

    Do nothing if the server was not started for capture.
    """
    settings = CaptureSettings.from_environment()
    if settings is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_seams()
    from draftstates.capture import load_audit, mla_cpu, numbers
    from draftstates.capture.admission import Admission, answering
    from draftstates.capture.recorder import VERSION, Recorder

    numbers.remember_start()
    if not hasattr(resolve(SERVER_ARGS), "resolve_once"):
        # SGLang 0.5.17 resolves its arguments in place.
        given = f"{SERVER_ARGS}.__post_init__"
        HookRegistry.register(given, numbers.remember_arguments, HookType.BEFORE)
    load_audit.register(settings)
    admission = Admission(settings)
    recorder = Recorder(settings, admission)
    HookRegistry.register(LOAD_MODEL, admission.before_load_model, HookType.BEFORE)
    HookRegistry.register(LOAD_MODEL, admission.after_load_model, HookType.AFTER)
    HookRegistry.register(LOAD_MODEL, recorder.after_load_model, HookType.AFTER)
    answer = answering(recorder.after_logits, version=VERSION)
    HookRegistry.register(LOGITS, answer, HookType.AFTER)
    mla_cpu.register()


def check_seams() -> None:
    """Check that SGLang still has what capture reads and hooks.

    Raises:
        SystemExit: names the seam that has moved.
    """
    resolve(LOAD_MODEL)
    resolve(LOAD_WEIGHTS)
    resolve(PARALLEL)
    resolve(GRAPHS)
    from draftstates.capture import weights

    for place in weights.OTHERS:
        resolve(place)
    require(weights.UPDATER, found=dir(resolve(weights.UPDATER)), needed=WEIGHT_UPDATES)
    require(
        LOGITS, found=list(inspect.signature(resolve(LOGITS)).parameters), needed=LOGITS_PARAMETERS
    )
    require(
        FORWARD_BATCH,
        found=list(resolve(FORWARD_BATCH).__dataclass_fields__),
        needed=FORWARD_BATCH_FIELDS,
    )
    require(
        LOGITS_OUTPUT,
        found=list(resolve(LOGITS_OUTPUT).__dataclass_fields__),
        needed=("customized_info",),
    )


def check_server(*, dp_size: int, nodes: int) -> None:
    """Refuse a server whose rows cannot be captured; call it once the arguments are settled.

    Raises:
        SystemExit: names the argument that stands in the way.
    """
    if dp_size > 1 and nodes > 1:
        # The ranks fill one shard together. The last writer syncs what all ranks have written,
        # which works in one machine's page cache alone.
        refuse(
            "its data parallel ranks are on several nodes; start a server of its own on each node"
        )
    if not resolve(GRAPHS)("prefill", "disabled"):
        # A replayed graph runs no Python, so the entry hooks see nothing. The states that it hands
        # over lie in buffers that the next replay overwrites, perhaps before they are copied.
        refuse(
            "prefill graphs are on, and rows cannot be taken from a replayed graph; add"
            " --cuda-graph-backend-prefill disabled"
        )


def check_numbers(arguments: object, config: object, *, spec: CaptureSpec) -> str:
    """Refuse a server whose settings change numbers in a way that the capture key does not name.

    Call it before the model is loaded.

    Args:
        arguments: SGLang's `ServerArgs`.
        config: SGLang's `ModelConfig`.
        spec: the capture that was planned.

    Returns:
        what was compared of the configuration, see `numbers.check_configuration`.

    Raises:
        SystemExit: names the setting.
    """
    from draftstates.capture import numbers

    try:
        return numbers.check(arguments, config, spec=spec)
    except (numbers.Refused, UserError) as error:
        refuse(str(error))


def check_loaded_model(arguments: object, config: object, *, spec: CaptureSpec) -> None:
    """Refuse a model with another content or another number format than the capture's.

    Args:
        arguments: SGLang's `ServerArgs`.
        config: SGLang's `ModelConfig`.
        spec: the capture that was planned.

    Raises:
        SystemExit: names the difference; the capture key would not tell the rows apart.
    """
    from draftstates.capture.numbers import MADE_UP

    try:
        digest = (
            MADE_UP
            if arguments.load_format == "dummy"
            else model_digest(ModelFolder(Path(arguments.model_path)))
        )
    except UserError as error:
        refuse(str(error))
    if digest != spec.model_digest:
        refuse(
            f"{arguments.model_path} holds {digest}, but the capture is of {spec.model_digest}: the"
            " model has changed since the plan"
        )
    if str(config.dtype) != f"torch.{spec.compute_dtype}":
        refuse(f"it computes in {config.dtype}, but the capture is of {spec.compute_dtype}")
    online = "--quantization" in spec.engine_args
    if config.quantization and not spec.quantization and not online:
        refuse(
            f"it quantises the model ({config.quantization}), but the capture is of a model that is"
            " not quantised"
        )


def resolve(name: str) -> object:
    """Return the object of SGLang with this dotted name; end the process where it has moved."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        refuse(f"{name} is not there ({error})")


def require(seam: str, *, found: list[str], needed: tuple[str, ...]) -> None:
    """End the process where a seam lacks a name that capture needs."""
    missing = [name for name in needed if name not in found]
    if missing:
        refuse(f"{seam} has no {', '.join(missing)}; it has {', '.join(found)}")


def refuse(what: str) -> None:
    """End the process with the reason, on standard error too."""
    import sglang

    message = f"draftstates: cannot capture with sglang {sglang.__version__}: {what}"
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(message)
