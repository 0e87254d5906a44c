"""The configuration: each key with its type, default, check and help in one place.

To add a key, add one typed field to its section; `make schema` then writes it to
`schemas/config.schema.yaml`, the reference for users. Stages take the section that they need, or a
class that inherits from sections, so that no default exists twice.
"""

import datetime
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from draftstates.config_problems import not_plain, problems, refusal
from draftstates.config_types import (
    FROM_TEXT,
    NAME,
    Bytes,
    ConfiguredPath,
    Count,
    Date,
    Dtype,
    FinalNorm,
    Fraction,
    LayerNumbers,
    Layers,
    Name,
    Natural,
    Positive,
    SampleIds,
    Section,
    as_schema,
)
from draftstates.engine import flags, variables
from draftstates.errors import UserError
from draftstates.files import publish_text
from draftstates.hub import HUB_ID, cached_snapshot, is_hub_id, model_name
from draftstates.paths import Results

Column = Literal[
    "messages",
    "role",
    "content",
    "tools",
    "system",
    "instruction",
    "input",
    "output",
    "prompt",
    "completion",
    "history",
    "input_ids",
    "loss_mask",
    "chat_template_kwargs",
]
ChatRole = Literal["system", "developer", "user", "assistant", "tool"]
# auto, template, DeepSeek-V3.2's own encoding, and the text renderers of the package renderers
Renderer = Literal[
    "auto",
    "template",
    "deepseek-v3.2",
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v4",
    "gemma4",
    "glm-4.5",
    "glm-5",
    "glm-5.1",
    "glm-5.3",
    "gpt-oss",
    "hy3",
    "kimi-k2",
    "kimi-k2.5",
    "laguna-m.1",
    "laguna-s-2.1",
    "laguna-xs-2.1",
    "laguna-xs.2",
    "llama-3",
    "minimax-m2",
    "nemotron-3",
    "nemotron-3-ultra",
    "nemotron-3.5",
    "prime-qwen3",
    "qwen3",
    "qwen3-vl",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
]
TrainerName = Literal["speculators", "specforge", "model_optimizer", "deepspec", "nemo_automodel"]
# the others use the target model's vocabulary, or make their own
WITH_DRAFT_VOCABULARY: tuple[TrainerName, ...] = ("speculators", "specforge", "nemo_automodel")

# the date for templates that ask for today's: with the true date, the ids would change every day
TEMPLATE_DATE = datetime.date(2024, 7, 26)


# arguments of `apply_chat_template` that are not the template's
_RESERVED = (
    *("conversation", "messages", "tools", "chat_template", "tokenizer_kwargs", "tokenize"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "strftime_now"),
)


def reserved_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names among arguments for a template that rendering itself sets."""
    return sorted(set(_RESERVED) & set(arguments))


def _not_reserved(arguments: dict[str, Any]) -> dict[str, Any]:
    if found := reserved_arguments(arguments):
        raise refusal(f"expected arguments of the template, found {', '.join(found)}")
    return arguments


# ---- Keys --------------------------------------------------------------------------------------


class RowOptions(Section):
    """Options by which rows are read from the files of a source."""

    format: Literal[
        "auto", "messages", "sharegpt", "responses", "alpaca", "completion", "tokens"
    ] = Field(
        "auto", description="how a row holds its conversation; auto decides by the row's columns"
    )
    columns: dict[Column, str] = Field(
        {}, description="the columns that this source calls otherwise, standard name: its name"
    )
    limit: Count | None = Field(None, description="read only this many rows; null for all")
    weight: Annotated[float, Field(gt=0, le=1), FROM_TEXT] = Field(
        1.0, description="share of the rows to keep, chosen by their content"
    )


class HubData(Section):
    """A data set of the Hugging Face hub."""

    id: Annotated[str, Field(pattern=f"^{HUB_ID}$")] = Field(
        description="its id, such as HuggingFaceH4/ultrachat_200k"
    )
    subset: str | None = Field(None, description="its subset; null for the default one")
    split: Annotated[str, Field(min_length=1)] = Field("train", description="the split to read")
    revision: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="branch, tag or commit; null for the main branch. It is resolved to a commit,"
        " which is recorded and read",
    )


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_not_reserved)]


def _not_nearly_zero(temperature: float) -> float:
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise refusal(f"expected 0, or at least {_LEAST_TEMPERATURE}, found {temperature}")
    return temperature


# below it, rounding decides what is drawn, and SGLang takes 0 for the least ones
_LEAST_TEMPERATURE = 0.01


class Sampling(Section):
    """How the target model's tokens are drawn."""

    temperature: Annotated[
        float, Field(ge=0, le=2), AfterValidator(_not_nearly_zero), FROM_TEXT
    ] = Field(0.7, description="0 takes the most likely token; else at least 0.01")
    top_p: Annotated[float, Field(gt=0, le=1), FROM_TEXT] = Field(
        0.95, description="draw from the most likely tokens that have this probability together"
    )
    top_k: Count | None = Field(
        None, description="number of most likely tokens to draw from; null for no limit"
    )
    max_new_tokens: Count = Field(
        4096,
        description="most tokens of an answer; it is cut earlier where prompt and answer come to"
        " data.max_tokens",
    )


class Answers(Section):
    """Answers by the target model, in place of the data's own."""

    turns: Literal["all", "last"] = Field(
        "all",
        description="all answers each user turn in order, on the model's own earlier answers; last"
        " answers the last one, on the data's",
    )
    samples: Count = Field(1, description="answers to each prompt")
    sampling: Sampling = Field(default_factory=Sampling, description="how tokens are drawn")
    truncated: Literal["open", "skip"] = Field(
        "open",
        description="an answer that is cut at its most tokens is kept without an end token, or left"
        " out with the turns that would follow",
    )
    skip_degenerate: bool = Field(
        False,
        description="leave out answers that are empty, repeat one token or end without text, with"
        " the turns that follow; they are counted in any case",
    )
    seed: Natural = Field(0, description="seed of the server's draws")
    chunk: Annotated[int, Field(ge=1), FROM_TEXT] = Field(
        2048, description="approximate number of prompts in one job"
    )
    in_flight: Count = Field(
        256, description="conversations that one job has under way at the server"
    )

    @model_validator(mode="after")
    def _draw_each_sample(self) -> Self:
        if self.samples > 1 and not self.sampling.temperature:
            raise refusal(
                f"expected 1 at temperature 0, which gives each prompt one answer, found"
                f" {self.samples}",
                key="samples",
            )
        return self


class Source(RowOptions):
    """One source of conversations: files, or a data set of the hub."""

    name: Name = Field(
        description="letters, digits, dot, dash or underscore; it names the source's outputs, so"
        " each source needs another name"
    )
    files: list[ConfiguredPath] = Field(
        [],
        description="JSONL, JSON (also .gz or .zst), Parquet or Arrow files, patterns such as"
        " data/train-*.parquet, folders of such files, or folders made by datasets' save_to_disk",
    )
    hub: HubData | None = Field(
        None,
        description="a data set of the hub instead of files, from the local cache; it is fetched"
        " where there is a network and HF_HUB_OFFLINE is not set",
    )
    template_arguments: TemplateArguments = Field(
        {},
        description="arguments for the template, over those of data; a row's column"
        " chat_template_kwargs goes over both",
    )
    answers: Answers | None = Field(
        None, description="have the target model answer; null for the data's own answers"
    )

    @model_validator(mode="after")
    def _have_one_origin(self) -> Self:
        if bool(self.files) == bool(self.hub):
            raise refusal(
                "expected files or hub, found " + ("both" if self.files else "neither"), key="files"
            )
        return self


class SampleOptions(Section):
    """Options by which the conversations of all sources become samples."""

    max_tokens: Annotated[int, Field(ge=2), FROM_TEXT] = Field(
        description="longest sample in tokens"
    )
    over_long: Literal["skip", "cut"] = Field(
        "skip", description="a longer sample is skipped, or cut at the end of a turn"
    )
    deduplicate: bool = Field(
        True, description="skip a sample that has the tokens and the loss_mask of an earlier one"
    )
    train_on: Literal["all", "last"] = Field(
        "all", description="the assistant turns whose tokens are supervised"
    )
    include_reasoning: bool = Field(
        True, description="reasoning tokens are supervised; they are rendered in any case"
    )
    rewritten_history: Literal["split", "last", "skip"] = Field(
        "split",
        description="where the template renders earlier turns differently once later turns follow"
        " (Qwen3 drops earlier reasoning): one sample for each turn, a sample of the last turn"
        " alone, or no sample",
    )
    roles: dict[Annotated[str, Field(min_length=1)], ChatRole] = Field(
        {},
        description="other names of roles that the messages use, such as the model's own name:"
        " {kimi: assistant}",
    )
    may_drop: list[Literal["reasoning", "tools"]] = Field(
        [],
        description="content that a row may lose where the template does not render it; such rows"
        " are kept and counted, others are skipped as not_rendered",
    )
    renderer: Renderer = Field(
        "auto",
        description="what renders conversations: template is the tokenizer's own template, or"
        " chat_template; a name is a renderer of the package renderers, or deepseek-v3.2; auto"
        " takes the template where it passes the checks, else the renderer of the model's type",
    )
    chat_template: ConfiguredPath | None = Field(
        None, description="a Jinja file to use instead of the tokenizer's own template"
    )
    template_arguments: TemplateArguments = Field(
        {}, description="arguments for the template, such as enable_thinking: false"
    )
    template_date: Date = Field(
        TEMPLATE_DATE,
        description="the date that a template finds where it asks for today's, so that input_ids"
        " are the same on any day",
    )
    end_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="tokens that end a turn, beyond those that the model's files name"
    )
    max_skipped_fraction: Fraction = Field(
        0.2,
        description="a larger share of bad rows stops the run (duplicates, over-long rows and rows"
        " that weight leaves out do not count)",
    )


class Data(SampleOptions):
    """The conversations, and the options by which they become samples."""

    sources: Annotated[list[Source], Field(min_length=1)] = Field(
        description="where the conversations are, each source with a name and its files"
    )

    @field_validator("sources")
    @classmethod
    def _name_each_differently(cls, sources: list[Source]) -> list[Source]:
        names = [source.name for source in sources]
        for name in sorted({name for name in names if names.count(name) > 1}):
            raise refusal(
                f"expected a different name for each source, found {name} {names.count(name)} times"
            )
        return sources

    @model_validator(mode="after")
    def _supervise_every_sampled_token(self) -> Self:
        answering = [source for source in self.sources if source.answers]
        if answering and not self.include_reasoning:
            raise refusal(
                f"expected true, since source {answering[0].name} has answers: every token that the"
                " target model says is supervised",
                key="include_reasoning",
            )
        if len(seeds := {each.answers.seed for each in answering}) > 1:
            raise refusal(
                f"expected one seed in the answers of all sources, which share a server, found"
                f" {', '.join(map(str, sorted(seeds)))}",
                key="sources",
            )
        if self.train_on == "last" and any(each.answers.turns == "all" for each in answering):
            raise refusal(
                "expected all, since a source has answers to all turns: set its answers.turns: last"
                " for the last one alone",
                key="train_on",
            )
        return self

    def source(self, name: str) -> Source:
        """Return the source with a name.

        Raises:
            UserError: the configuration has no such source.
        """
        known = {source.name: source for source in self.sources}
        if name not in known:
            raise UserError(f"data.sources: no source named {name!r}; there are {', '.join(known)}")
        return known[name]


class RemoteCode(Section):
    """The permission to run code that comes with the model."""

    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model and its tokenizer"
    )


class Model(RemoteCode):
    """The target model."""

    path: ConfiguredPath = Field(
        description="folder of the model, in Hugging Face's layout with safetensors; or the id of a"
        " model that lies in the hub's local cache"
    )
    name: Name | None = Field(
        None,
        validate_default=True,
        description="name for people, in the manifest and in the capture folder's name; null for"
        " the name of the model's folder",
    )
    prepare: Literal["none", "smollm2"] = Field(
        "none",
        description="smollm2 makes the demo's model at `path` first; none expects a model there",
    )
    engine_args: list[str] = Field(
        [],
        description="arguments for SGLang that change the captured numbers, such as"
        " --kv-cache-dtype, each a string; they enter the capture key",
    )
    engine_env: dict[str, str] = Field(
        {},
        description="environment variables for SGLang that change the captured numbers, such as"
        " NVIDIA_TF32_OVERRIDE, each value a string; they enter the capture key",
    )

    @field_validator("path")
    @classmethod
    def _look_into_the_hubs_cache(cls, path: Path) -> Path:
        if path.exists() or not is_hub_id(str(path)):
            return path
        return cached_snapshot("models", str(path)) or path

    @field_validator("name")
    @classmethod
    def _take_the_folders_name(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None or "path" not in info.data:
            return name
        name = model_name(info.data["path"])
        if not re.fullmatch(NAME, name):
            raise refusal(f"missing: the folder's name, {name!r}, cannot name a results folder")
        return name

    @field_validator("engine_args")
    @classmethod
    def _take_one_spelling(cls, args: list[str]) -> list[str]:
        _all_accepted(flags.engine_problems(args))
        return flags.canonical(args)

    @field_validator("engine_env")
    @classmethod
    def _refuse_others(cls, env: dict[str, str]) -> dict[str, str]:
        _all_accepted(variables.engine_problems(env))
        return env


class CaptureOptions(Section):
    """The states to capture of each token."""

    residual_layers: Layers = Field(
        "eagle3",
        description="eagle3 stands for r_2, r_{N//2}, r_{N-3}; {dflash: 5} for those that a DFlash"
        " drafter of 5 layers reads; a list of ascending k names each r_k, the residual stream"
        " after k decoder layers; an empty list for the final state alone, as MTP and EAGLE-1 read",
    )
    final_state: bool = Field(
        True,
        description="capture the final state of every token; false, as for DFlash, leaves it out,"
        " and the receipts keep that of each sample's last token, for alignment",
    )
    final_norm: FinalNorm = Field(
        "post_norm", description="whether the final state is taken after or before the final norm"
    )
    stored_dtype: Dtype = Field("bfloat16", description="number format of the stored states")
    compute_dtype: Dtype = Field(
        "bfloat16", description="number format that the server computes in"
    )
    reuse_prefixes: bool = Field(
        False,
        description="whether the server computes the rows of a shared prefix once: its radix cache"
        " stays on, and a sample is sent when the samples whose rows it shares are captured",
    )

    @model_validator(mode="after")
    def _capture_something(self) -> Self:
        if not (self.residual_layers or self.final_state):
            raise refusal(
                "expected true where residual_layers is empty, found false: nothing would be"
                " captured",
                key="final_state",
            )
        return self


class Shards(Section):
    """Sizes of the shard files."""

    min_bytes: Bytes = Field(2 << 30, description="smallest shard, but for the last of a source")
    max_bytes: Bytes = Field(16 << 30, description="largest shard, at least twice min_bytes")
    share_prefixes: bool = Field(
        True,
        description="whether samples of a shard that begin with the same tokens share these rows,"
        " which are then stored once; for min_bytes and max_bytes they count for each sample",
    )
    min_shared_tokens: Count = Field(64, description="shortest prefix that is shared")

    @model_validator(mode="after")
    def _leave_room_to_cut(self) -> Self:
        if self.max_bytes < 2 * self.min_bytes:
            raise refusal(
                f"expected at least twice shards.min_bytes ({self.min_bytes:,}), found"
                f" {self.max_bytes:,}",
                key="max_bytes",
            )
        return self


class StorageOptions(Section):
    """The form in which verified shards stay on the disk."""

    format: Literal["as_captured", "e4m3"] = Field(
        "as_captured",
        description="e4m3 stores one byte a value, and a scale per row and layer; each shard is"
        " captured, verified and rewritten by one job, and the captured file is removed, so that an"
        " edited row captures its whole shard again",
    )
    keep_top_token: bool = Field(
        True,
        description="with e4m3, store a final state as captured where e4m3 would change its most"
        " likely token",
    )

    @property
    def form(self) -> str | None:
        """Name of the form in paths; None for shards as captured."""
        if self.format == "as_captured":
            return None
        return f"{self.format}-top-token" if self.keep_top_token else self.format


class Checks(Section):
    """The number of prefix recaptures, and the comparison with the checkpoint."""

    recapture_fraction: Fraction = Field(
        0.01,
        description="fraction of the samples that is captured once more as a prefix and compared,"
        " and of those with shared rows that are compared when these are computed again",
    )
    recapture_minimum: Count = Field(
        3, description="samples of each shard that are captured once more, at least"
    )
    answers: Positive | None = Field(
        None,
        description="largest difference of a sampled token's log probability between the server"
        " that answered and the captured state; null for the number format's (docs/answers.md)",
    )
    parity: Literal["auto", "required"] = Field(
        "auto",
        description="auto compares the server with the checkpoint wherever transformers has the"
        " family, and the manifest says where it has not; required makes that an error",
    )
    parity_tokens: Annotated[int, Field(ge=64), FROM_TEXT] = Field(
        4352,
        description="longest prompt that is compared; it goes beyond each window, chunk or rope"
        " length of the model that is so much shorter, and the manifest names the others",
    )
    parity_layers: Count | None = Field(
        None, description="number of decoder layers to compare; null for all"
    )


class Slurm(Section):
    """Options for submitting and watching server jobs, where the launcher is slurm."""

    sbatch: list[Annotated[str, Field(pattern="^--?[A-Za-z]")]] = Field(
        [], description="arguments of sbatch for one server, such as --partition=gpu"
    )
    interface: str | None = Field(
        None,
        description="network interface whose address a server binds; null for the one by which its"
        " node reaches Snakemake's host",
    )
    drain_seconds: Annotated[float, Field(ge=0), FROM_TEXT] = Field(
        1800.0,
        description="so long before its time limit a job gets no more shards and another job is"
        " submitted; longer than one shard takes",
    )
    queue_seconds: Positive = Field(86400.0, description="longest wait for a job to start")
    heartbeat_seconds: Annotated[float, Field(ge=5), FROM_TEXT] = Field(
        120.0,
        description="time without a sign of their run after which server jobs and clients end",
    )
    poll_seconds: Annotated[float, Field(ge=1), FROM_TEXT] = Field(
        15.0, description="time between two looks at the queue"
    )


class LeaseOptions(Section):
    """The keys that a client of the server needs."""

    launcher: Literal["local", "slurm", "external"] = Field(
        "local",
        description="local starts SGLang on this machine; slurm starts it as jobs of its own;"
        " external uses a server that runs already",
    )
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = Field(
        None, description="address of an external server"
    )
    api_key_file: ConfiguredPath | None = Field(
        None, description="file that holds an external server's key"
    )
    replicas: Count = Field(
        1,
        description="servers to start, each with the whole model and GPUs of its own; shards are"
        " spread over them",
    )
    restarts: Natural = Field(
        2, description="how often a replica that fails while others serve is started again"
    )
    slurm: Slurm = Field(
        default_factory=Slurm, description="the servers' jobs, where the launcher is slurm"
    )
    start_seconds: Positive = Field(
        1800.0, description="time from the start of a server until its self-test must have passed"
    )
    idle_seconds: Positive = Field(
        60.0,
        description="time without use after which the server ends, or the time that its start took"
        " if that is longer",
    )
    stop_seconds: Positive = Field(
        5.0, description="time between asking the server to end and killing it"
    )

    @model_validator(mode="after")
    def _need_an_address(self) -> Self:
        if self.launcher == "external" and not self.url:
            raise refusal(
                "missing: the launcher external needs the address of a server that runs already",
                key="url",
            )
        return self


def _all_accepted(problems: list[str]) -> None:
    if problems:
        raise refusal("; ".join(problems))


class Server(LeaseOptions):
    """The SGLang servers that capture."""

    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto",
        description="what the server computes on; auto uses GPUs where the machine has them, and"
        " always in Slurm jobs",
    )
    tensor_parallel: Count = Field(1, description="GPUs of one server")
    data_parallel_attention: Count = Field(
        1,
        description="ranks that attention is split into by requests, a divisor of tensor_parallel;"
        " SGLang divides the tokens of a prefill chunk by it, and each rank writes by itself, with"
        " queue_bytes of its own",
    )
    args: list[str] = Field(
        [],
        description="more arguments for SGLang, each a string: flags that schedule, place, size or"
        " log, such as --chunked-prefill-size; those that change the captured numbers stand in"
        " model.engine_args",
    )
    env: dict[str, str] = Field(
        {},
        description="environment variables for SGLang, each value a string; those that change the"
        " captured numbers stand in model.engine_env",
    )
    state: ConfiguredPath | None = Field(
        None,
        description="folder for the server's locks, on a disk of this machine, or for slurm on a"
        " disk that all nodes share; null for .server below the results",
    )
    queue_bytes: Bytes = Field(
        2 << 30,
        description="host memory for states on their way to the disk, of each rank that writes"
        " (one; with data parallel attention, each rank); on a GPU it is pinned at the start",
    )
    writers: Count = Field(8, description="threads that write")

    @field_validator("args")
    @classmethod
    def _refuse_misplaced(cls, args: list[str]) -> list[str]:
        _all_accepted(flags.server_problems(args))
        return args

    @field_validator("env")
    @classmethod
    def _refuse_numeric(cls, env: dict[str, str]) -> dict[str, str]:
        _all_accepted(variables.server_problems(env))
        return env

    @model_validator(mode="after")
    def _divide_ranks(self) -> Self:
        if self.tensor_parallel % self.data_parallel_attention:
            raise refusal(
                f"expected a divisor of tensor_parallel, {self.tensor_parallel}, found"
                f" {self.data_parallel_attention}",
                key="data_parallel_attention",
            )
        return self


class Containers(Section):
    """Apptainer images."""

    tools: ConfiguredPath | None = Field(
        None,
        description="image of all steps, used with --software-deployment-method apptainer",
    )
    sglang: ConfiguredPath | None = Field(
        None, description="image of the server that the launchers local and slurm start"
    )
    sglang_args: list[str] = Field(
        [],
        description="more arguments for the server's apptainer exec; --nv is added by itself where"
        " the server computes on GPUs",
    )


class Extract(Section):
    """Options of the extraction of shards; none of them changes the captured states."""

    tokens_in_flight: Count = Field(
        65536, description="tokens that one extracting job has under way at the server"
    )
    tokens_per_second: Positive | None = Field(
        None,
        description="assumed rate of all servers together, for the estimate of hours alone; null"
        " for no estimate",
    )
    reuse: bool = Field(
        True,
        description="whether a new shard takes the rows that earlier verified shards hold; false"
        " captures them all again",
    )


class Export(Section):
    """Options of the export for one trainer."""

    residual_layers: LayerNumbers | None = Field(
        None, description="the r_k to export, ascending; null for all but r_N"
    )
    final_norm: FinalNorm | None = Field(None, description="null for what the trainer reads")
    dtype: Dtype | None = Field(
        None, description="number format of the exported states; null for the stored one"
    )
    seq_length: Count | None = Field(
        None,
        description="tokens that NeMo Automodel's samples are padded to; null for those of the"
        " longest one",
    )
    target_probs_topk: Count | None = Field(
        None,
        description="probabilities of the target model to keep of each token for NeMo Automodel;"
        " null for those of the whole draft vocabulary",
    )
    target_model: str | None = Field(
        None,
        description="the model's name in the trainer's configuration (DeepSpec compares it); null"
        " for the captured model's",
    )
    split: Literal["train", "validation"] | None = Field(
        None, description="only these samples, chosen by their own ids; null for all"
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1), FROM_TEXT] = Field(
        0.05, description="share of the samples that a split holds out"
    )


class Configuration(Section):
    """The configuration of a capture; a profile says how it runs (cores, partitions, retries)."""

    data: Data = Field(description="the conversations, and how they become samples")
    model: Model = Field(description="the target model")
    capture: CaptureOptions = Field(description="what is captured of each token")
    shards: Shards = Field(default_factory=Shards, description="sizes of the shard files")
    storage: StorageOptions = Field(
        default_factory=StorageOptions, description="how verified shards are stored"
    )
    max_bytes: Bytes | None = Field(
        None,
        description="budget for the states on the disk; null for the disk's free space alone",
    )
    checks: Checks = Field(
        default_factory=Checks, description="how much is captured a second time, to compare"
    )
    exclude: SampleIds = Field([], description="sample ids to leave out, 32 hex digits each")
    server: Server = Field(default_factory=Server, description="the SGLang servers that capture")
    containers: Containers = Field(
        default_factory=Containers,
        description="Apptainer images, as `make images` names them; null for the host",
    )
    extract: Extract = Field(default_factory=Extract, description="how shards are extracted")
    draft_vocab_size: Count | None = Field(
        None,
        description="tokens of the drafter's vocabulary, for its files in <results>/vocabulary and"
        " in exports; null for no such vocabulary",
    )
    exports: dict[TrainerName, Export] = Field(
        {},
        description="the trainers that get an export of their own, such as speculators: {}",
    )
    results: ConfiguredPath = Field(
        Path("results"), description="folder for everything that is made"
    )

    @model_validator(mode="after")
    def _check_answers_by_final_states(self) -> Self:
        answering = [source.name for source in self.data.sources if source.answers]
        if answering and not self.capture.final_state:
            raise refusal(
                f"expected true, since source {answering[0]} has answers, and every sampled token"
                " is compared with the final state before it; found false",
                key="capture.final_state",
            )
        return self

    @property
    def state_folder(self) -> Path:
        """Folder in which the clients and the supervisor of a server coordinate."""
        return (self.server.state or Results(self.results).server_state).resolve()

    @property
    def resolved_path(self) -> Path:
        """File of this configuration for the jobs of a run.

        Its name is a hash of its content, so it never changes while a job uses it.
        """
        digest = hashlib.sha256(self.as_text().encode()).hexdigest()
        return Results(self.results).config(digest[:16])


# ---- Reading and writing -----------------------------------------------------------------------


def load(path: Path) -> Configuration:
    """Read a configuration file and `resolve` it.

    Raises:
        UserError: the file cannot be read, holds no YAML mapping, or `resolve` refuses it.
    """
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: the configuration cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: text that is not UTF-8, an impossible date, thousands of digits
        raise UserError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(
            f"{path}: expected a mapping of configuration keys, found {type(raw).__name__}"
        )
    return resolve(raw, origin=str(path))


def resolve(raw: Mapping[str, Any], *, origin: str) -> Configuration:
    """Check a configuration and fill in the missing keys.

    Args:
        raw: the configuration as a YAML reader or Snakemake gives it.
        origin: file or other origin of the configuration, for messages.

    Raises:
        UserError: keys are wrong; the message names the path of each, such as
            `data.sources[0].nmae`.
    """
    if found := sorted(not_plain(raw)):
        raise UserError(f"{origin}: " + "; ".join(found))
    # a YAML reader or Snakemake may give subclasses: pydantic gets plain dicts and lists
    plain = json.loads(json.dumps(raw, allow_nan=False))
    try:
        config = Configuration.model_validate(plain)
    except ValidationError as error:
        raise UserError(
            f"{origin}: " + "; ".join(problems(error, Configuration.model_json_schema()))
        ) from None
    return config


def save_resolved(config: Configuration) -> None:
    """Write a configuration to its `resolved_path`.

    The commands that the workflow starts read it, so a damaged one is written again.
    """
    publish_text(
        yaml.safe_dump(config.plain(), allow_unicode=True, sort_keys=False), config.resolved_path
    )


def check_results(results: Path) -> None:
    """Refuse a results folder that cannot be written, before Snakemake fails at it.

    Raises:
        UserError: the folder cannot be written; the message names the obstacle.
    """
    folder = results.absolute()
    try:
        folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        # such as a name that is too long
        raise UserError(f"results: {results} cannot be written: {error.strerror}") from None
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"results: {results} cannot be written: {folder} is no folder that this user may write"
            " to"
        )


def schema_text() -> str:
    """Return the text of `schemas/config.schema.yaml`."""
    return as_schema(Configuration, title="draftstates configuration")


if __name__ == "__main__":
    sys.stdout.write(schema_text())
