"""SGLang's flags: those that schedule, place, size or log; those that change numbers; and those
that make a capture wrong or pointless.

The names are those of SGLang 0.5.17 to 0.5.23. The module needs no SGLang: a configuration is
checked where only a container has it. SGLang's own parser is asked by `capture.arguments`.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from draftstates.engine import variables

CONTEXT_FLAG = "--context-length"
_FREE = (
    # devices, processes, loading
    "--base-gpu-id --gpu-id-step --numa-node --gc-threshold --watchdog-timeout"
    " --soft-watchdog-timeout --sleep-on-idle --dist-timeout --dist-init-addr --nccl-init-addr"
    " --nccl-port --pre-warm-nccl --enable-p2p-check --ep-size --expert-parallel-size --ep"
    " --moe-dense-tp-size --load-balance-method --cpu-offload-gb --offload-group-size"
    " --offload-mode --offload-num-in-group --offload-prefetch-step --weight-loader-disable-mmap"
    " --weight-loader-prefetch-checkpoints --weight-loader-prefetch-num-threads"
    " --weight-loader-drop-cache-after-load --detokenizer-worker-num --tokenizer-worker-num"
    " --skip-server-warmup --batch-notify-size --model-checksum"
    # sizes and schedule
    " --context-length --mem-fraction-static --max-running-requests --max-queued-requests"
    " --max-total-tokens --chunked-prefill-size --max-prefill-tokens --prefill-max-requests"
    " --page-size --swa-full-tokens-ratio --mamba-full-memory-ratio --max-mamba-cache-size"
    " --disable-hybrid-swa-memory --schedule-policy --schedule-conservativeness"
    " --scheduler-recv-interval --num-continuous-decode-steps --stream-interval"
    " --disable-overlap-schedule --enable-mixed-chunk --retraction-policy"
    " --enable-prefill-delayer --prefill-delayer-max-delay-passes"
    " --prefill-delayer-max-delay-ms --prefill-delayer-token-usage-low-watermark"
    " --prefill-delayer-queue-min-ratio --enable-priority-scheduling"
    " --priority-scheduling-preemption-threshold --schedule-low-priority-values-first"
    " --disable-priority-preemption --abort-on-priority-when-disabled"
    # logs and metrics
    " --log-level --log-level-http --log-requests --log-requests-level --log-requests-format"
    " --log-requests-target --crash-dump-folder --show-time-cost --enable-metrics"
    " --enable-metrics-for-all-schedulers --enable-mfu-metrics --extra-metric-labels"
    " --bucket-time-to-first-token --bucket-inter-token-latency --bucket-e2e-request-latency"
    " --prompt-tokens-buckets --generation-tokens-buckets --prefill-delayer-wait-seconds-buckets"
    " --prefill-delayer-forward-passes-buckets --gc-warning-threshold-secs"
    " --decode-log-interval --enable-request-time-stats-logging --enable-trace --trace-modules"
    " --otlp-traces-endpoint --otlp-service-name --export-metrics-to-file"
    " --export-metrics-to-file-dir --tokenizer-metrics-custom-labels-header"
    " --tokenizer-metrics-allowed-custom-labels --uvicorn-access-log-exclude-prefixes"
    " --enable-cache-report"
    # behind the captured states, and needed where a library is missing
    " --sampling-backend --grammar-backend"
)
# Flags that do not change which numbers are computed: `server.args` takes these alone.
ALLOWED = frozenset(_FREE.split())

_MERGE = (
    "an adapter makes another model, and the base model would be captured: merge it first, with"
    ' `python -c "from peft import AutoPeftModelForCausalLM as M;'
    " M.from_pretrained('ADAPTER').merge_and_unload().save_pretrained('MERGED')\"`, and name the"
    " merged model in model.path"
)
_SPECULATIVE = "nothing is decoded, and a drafter's passes are not the target model's"
_SPLIT = "the prefill and the rows must be in one server; use server.replicas"
_PIPELINE = "a pipeline parallel server cannot be captured"
_OTHER_MODEL = (
    "it replaces the model of model.path, which the capture key names; change the model's folder"
    " instead"
)
_UNSEEN = "it can change what the model computes, and the capture key would not tell"
_GRAPHS = "the workflow sets it: rows cannot be taken from a replayed graph"
_CACHES = "rows that a cache holds are not computed, and cannot be captured"
_OWN_ROWS = "it splits or overlaps what the hooks read, so that rows would be wrong or missing"
_OWN = "the workflow sets it"
_BEHIND = "it acts on text and sampling, behind the captured states"
_RELEASED = "the weights must stay as they were checked for as long as the server captures"
# A flag that ends with * stands for all flags that begin so.
REFUSED = {
    flag: reason
    for flags, reason in (
        ("--model-path --model", "use model.path"),
        ("--tokenizer-path --tokenizer-mode --tokenizer-backend --chat-template", _OWN),
        ("--served-model-name --weight-version --revision --download-dir", _OWN),
        ("--help -h", "it prints a help text and starts no server"),
        ("--dtype", "use capture.compute_dtype"),
        ("--trust-remote-code", "use model.trust_remote_code"),
        ("--config --host --port --api-key --admin-api-key --ssl-* --enable-http2", _OWN),
        (
            "--grpc-* --smg-grpc-* --use-ray --sidecar* --fastapi-root-path --skip-tokenizer-init",
            _OWN,
        ),
        ("--device", "use server.device"),
        ("--tp --tp-size --tensor-parallel-size", "use server.tensor_parallel"),
        (
            "--dp --dp-size --data-parallel-size --attn-dp-size --attention-data-parallel-size"
            " --enable-dp-attention",
            "use server.replicas, or server.data_parallel_attention",
        ),
        ("--pp --pp-size --pipeline-parallel-size --pp-*", _PIPELINE),
        ("--nnodes --node-rank", "a server is on one node; use server.replicas"),
        (
            "--enable-lora* --lora-* --max-lora-* --max-loras-per-batch --max-loaded-loras"
            " --uno-lora-path --experts-shared-outer-loras --no-experts-shared-outer-loras"
            " --no-lora-*",
            _MERGE,
        ),
        ("--speculative-* --no-speculative-* --spec-* --enable-multi-layer-eagle", _SPECULATIVE),
        ("--decoupled-spec-* --enable-draft-*", _SPECULATIVE),
        (
            "--disaggregation-* --encoder-* --language-only --language-model-only --enable-pdmux"
            " --pdmux-* --enable-pd-role-switch --enable-adaptive-dispatch-to-encoder"
            " --optimistic-prefill-attempts",
            _SPLIT,
        ),
        (
            "--decrypted-* --json-model-override-args --model-config-parser --load-format"
            " --model-loader-extra-config --custom-weight-loader --kt-*"
            " --modelopt-checkpoint-* --modelopt-export-path --modelexpress-config"
            " --remote-instance-* --weight-cache-* --quantization-param-path",
            _OTHER_MODEL,
        ),
        (
            "--startup-weight-load-mode --checkpoint-engine-* --delete-ckpt-after-loading"
            " --enable-memory-saver --enable-weights-cpu-backup --enable-elastic-expert-backup"
            " --elastic-ep-*",
            _RELEASED,
        ),
        ("--forward-hooks --debug-tensor-dump-* --msprobe-dump-config --kv-canary*", _UNSEEN),
        (
            "--cuda-graph-* --context-bucket --enable-profile-cuda-graph --debug-cuda-graph"
            " --disable-cuda-graph --disable-decode-cuda-graph --disable-prefill-cuda-graph",
            _GRAPHS,
        ),
        ("--disable-radix-cache", _OWN),
        (
            "--sampling-defaults --sampling-mask-max-tokens"
            " --random-seed --reasoning-parser --tool-call-parser --tool-server --warmups"
            " --preferred-sampling-params --completion-template --hf-chat-template-name"
            " --default-chat-template-kwargs --trust-request-chat-template"
            " --enable-strict-thinking --strip-thinking-cache --constrained-json-*"
            " --enable-custom-logit-processor --watermark-config --enable-watermark"
            " --enable-streaming-session --enable-response-store --file-storage-path --asr-*"
            " --incremental-streaming-output --stream-response-default-include-usage"
            " --return-input-ids --return-output-ids --enable-tokenizer-batch-encode"
            " --disable-tokenizer-batch-decode --enable-dynamic-batch-tokenizer"
            " --dynamic-batch-tokenizer-* --http2-* --enable-http-worker-reuseport"
            " --enable-ssl-refresh --engine-info-bootstrap-port --gated-launch-port"
            " --disable-outlines-disk-cache --kv-events-config --load-publish-endpoint"
            " --load-snapshot-publish-interval --enable-forward-pass-metrics"
            " --forward-pass-metrics-* --enable-layerwise-nvtx-marker"
            " --smg-http-sidecar-port --grpc-http-sidecar-port",
            _BEHIND,
        ),
        (
            "--enable-decoder-swa-bounded-replay",
            "it leaves all but a request's last rows uncomputed",
        ),
        (
            "--enable-hierarchical-cache --enable-hicache --hicache-* --enable-lmcache --lmcache-*"
            " --enable-flexkv --flexkv-* --enable-unified-cache-* --unified-cache-*"
            " --enable-session-radix-cache --radix-* --prefill-only-disable-kv-cache",
            _CACHES,
        ),
        (
            "--enable-two-batch-overlap --tbo-* --enable-single-batch-overlap --attn-cp-size"
            " --attention-context-parallel-size --cp-strategy --dcp-* --no-dcp-*"
            " --decode-context-parallel-size --enable-prefill-cp --enable-cp-decode-attn-tp"
            " --enable-layernorm-sp --enable-megamoe-for-layernorm-sp"
            " --enable-attn-tp-input-scattered --dwdp-size --enable-prefill-context-parallel"
            " --enable-dsa-prefill-context-parallel --prefill-cp-mode --dsa-prefill-cp-mode",
            _OWN_ROWS,
        ),
        (
            "--is-embedding --dllm-* --no-dllm-* --enable-return-hidden-states"
            " --return-hidden-states-mode --enable-return-aux-hidden-states"
            " --return-aux-hidden-state-layer-ids --allow-auto-truncate",
            "a server that is started so does not answer as the capture needs",
        ),
    )
    for flag in flags.split()
}
# Reasons of flags that a server of others may have: they are compared by what follows from them.
_CHECKED_ELSEWHERE = {
    _OWN,
    _BEHIND,
    _GRAPHS,
    _CACHES,
    _PIPELINE,
    *(reason for reason in REFUSED.values() if reason.startswith(("use ", "a server is on"))),
}
# A flag of one dash, which is no number.
_SHORT = re.compile(r"-[A-Za-z]\w*")
_NEGATION = re.compile(r"--(no-)?(enable-|disable-)?")
# Flags whose effect on the numbers is named even where the flag is abbreviated.
_KNOWN_NUMERIC = ("--quantization", "--kv-cache-dtype", "--torchao-config", "--modelopt-quant")


def split(arguments: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return arguments as flags, each with its values; names have dashes, as SGLang's have.

    `--flag=value` is the same as two arguments.

    Raises:
        ValueError: a value stands before the first flag, or a flag and its value in one string.
    """
    flags: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if not argument.startswith("--") and not _SHORT.fullmatch(argument):
            if not flags:
                raise ValueError(f"expected a flag such as --log-level, found {argument!r}")
            flags[-1][1].append(argument)
            continue
        name, equals, value = argument.partition("=")
        if len(words := name.split()) != 1 or name != words[0]:
            apart = ", ".join(f'"{word}"' for word in argument.split())
            raise ValueError(
                f"expected each flag and each value as a string of its own, found {argument!r}:"
                f" write [{apart}]"
            )
        flags.append((name.replace("_", "-"), [value] if equals else []))
    return flags


def context_length(arguments: Iterable[str]) -> int | None:
    """Return the context length that a server's arguments name; the last one counts."""
    named = [values for name, values in split(arguments) if name == CONTEXT_FLAG]
    return int(named[-1][0]) if named and named[-1] and named[-1][0].isdigit() else None


def canonical(arguments: Iterable[str]) -> list[str]:
    """Return arguments in one spelling and order, so that equal ones give an equal key."""
    return [part for name, values in sorted(split(arguments)) for part in (name, *values)]


def placing(arguments: Iterable[str]) -> list[str]:
    """Return those of a server's arguments that `server.args` takes."""
    return _chosen(arguments, lambda name: name in ALLOWED)


def numeric(arguments: Iterable[str]) -> list[str]:
    """Return those of a server's arguments that belong into `model.engine_args`."""
    return _chosen(arguments, lambda name: name not in ALLOWED and refusal(name) is None)


def _chosen(arguments: Iterable[str], accept: Callable[[str], bool]) -> list[str]:
    flags = sorted(split(arguments))
    return [part for name, values in flags if accept(name) for part in (name, *values)]


def server_problems(arguments: Sequence[str]) -> list[str]:
    """Return why arguments cannot be in `server.args`, a reason each."""
    return _problems(
        arguments,
        otherwise="it is none of SGLang's flags that schedule, place, size or log: if SGLang has"
        " it, put it into model.engine_args, which enter the capture key",
        allowed=ALLOWED,
    )


def engine_problems(arguments: Sequence[str]) -> list[str]:
    """Return why arguments cannot be in `model.engine_args`, a reason each."""
    try:
        names = [name for name, _ in split(arguments)]
    except ValueError as error:
        return [str(error)]
    misplaced = [
        f"{name} is not accepted here: it changes no numbers; put it into server.args"
        for name in names
        if name in ALLOWED
    ]
    twice = [
        f"{name} is given {names.count(name)} times"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    files = [
        f"{name} is not accepted here: {variables.FILE}"
        for name, values in split(arguments)
        if name not in ALLOWED and not refusal(name) and any(map(variables.names_a_file, values))
    ]
    return misplaced + twice + files + _problems(arguments, otherwise=None, allowed=ALLOWED)


def _problems(
    arguments: Sequence[str], *, otherwise: str | None, allowed: frozenset[str]
) -> list[str]:
    """Return a reason for each flag that is refused, or that is not in `allowed`.

    Args:
        otherwise: the reason for a flag that is neither refused nor allowed; None accepts it.
    """
    try:
        names = [name for name, _ in split(arguments)]
    except ValueError as error:
        return [str(error)]
    reasons = _contradictions(names)
    for name in names:
        if name in allowed:
            continue
        reason = refusal(name) or (otherwise and (_numeric(name) or otherwise))
        if reason:
            reasons.append(f"{name} is not accepted here: {reason}")
    return reasons


def _contradictions(names: Sequence[str]) -> list[str]:
    """Return a reason for each flag that stands beside its negation, whatever the order."""
    by_subject: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        by_subject.setdefault(_NEGATION.sub("", name, count=1), []).append(name)
    return [
        f"{' and '.join(same)} contradict each other: keep one of them"
        for same in by_subject.values()
        if len(same) > 1 and any(name.startswith(("--no-", "--disable-")) for name in same)
    ]


def refusal(name: str) -> str | None:
    """Return why a flag makes a capture wrong or pointless, or None.

    SGLang accepts abbreviated flags, so an abbreviation of a refused flag is refused too.
    """
    if name in _KNOWN_NUMERIC:
        return None
    for flag, reason in REFUSED.items():
        if name == flag or (flag.endswith("*") and name.startswith(flag[:-1])):
            return reason
    return next(
        (reason for flag, reason in REFUSED.items() if flag.rstrip("*").startswith(name)), None
    )


def is_checked_elsewhere(name: str) -> bool:
    """Return whether a running server may have a flag that the capture key does not name.

    Such a flag changes no numbers, or the workflow compares what follows from it.
    """
    return name in ALLOWED or refusal(name) in _CHECKED_ELSEWHERE


def _numeric(name: str) -> str | None:
    if any(flag.startswith(name) for flag in _KNOWN_NUMERIC):
        return (
            "it changes the captured numbers, and the capture key would not tell; put it into"
            " model.engine_args, which enter the key"
        )
    return None
