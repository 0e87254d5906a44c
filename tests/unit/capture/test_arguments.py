"""SGLang's own parser and the capture key, on SGLang's real arguments."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic import capture_spec

from draftstates.capture import arguments, numbers
from draftstates.engine import flags
from draftstates.errors import UserError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 128,
    "dtype": "float32",
}


def server_args(*given: str) -> object:
    """Return SGLang's arguments as `python -m sglang.launch_server` makes them."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs.from_cli_args(arguments.parse(["--model-path", "models/any", *given]))


def refused(*given: str, **spec: object) -> str:
    with pytest.raises(numbers.Refused) as caught:
        numbers.check_arguments(server_args(*given), spec=spec_with(**spec))
    return str(caught.value)


def spec_with(**changes: object) -> object:
    return dataclasses.replace(capture_spec(), **changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max-total-tokens", "abc"], "argument --max-total-tokens: "),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--max-total", "4"], "unrecognized arguments: --max-total"),
        (["--kv-cache-dtype", "fp7"], "argument --kv-cache-dtype: invalid choice"),
    ],
)
def test_what_sglang_would_refuse_is_refused_before(given: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        arguments.parse(given)


def test_every_flag_of_the_lists_is_one_of_sglangs() -> None:
    """Else a list has aged; names that only SGLang 0.5.17 has, or that abbreviate, are few."""
    known = {name for names in arguments.names().values() for name in names}
    exact = {name for name in (*flags.ALLOWED, *flags.REFUSED) if not name.endswith("*")}
    assert exact - known == {
        "--dp",
        "--pp",
        "--tp",
        "--prefill-cp-mode",
        "--dsa-prefill-cp-mode",
        "--enable-prefill-context-parallel",
        "--enable-dsa-prefill-context-parallel",
    }
    for name in (each for each in flags.REFUSED if each.endswith("*")):
        assert any(flag.startswith(name[:-1]) for flag in known), name


def test_no_whole_flag_is_taken_for_an_abbreviation_of_a_refused_one() -> None:
    known = {name for names in arguments.names().values() for name in names}
    exact = {name for name in flags.REFUSED if not name.endswith("*")}
    prefixes = tuple(name[:-1] for name in flags.REFUSED if name.endswith("*"))
    for name in known - {"-h", "--help"} - exact - flags.ALLOWED:
        if not name.startswith(prefixes):
            assert flags.refusal(name) is None, name


def test_a_server_as_the_workflow_starts_it_is_accepted() -> None:
    numbers.check_arguments(
        server_args(
            *("--device", "cpu", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--dtype", "float32", "--tensor-parallel-size", "2", "--disable-radix-cache"),
            *("--cuda-graph-backend-prefill", "disabled", "--skip-tokenizer-init"),
            *("--sleep-on-idle", "--max-total-tokens", "16384", "--chunked-prefill-size", "256"),
        ),
        spec=capture_spec(),
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype fp8_e4m3, expected auto: put"),
        (["--quantization", "fp8"], "--quantization fp8, expected None: put --quantization into"),
        (["--modelopt-quant", "fp8"], "--modelopt-quant fp8"),
        (["--quantize-and-serve"], "--quantize-and-serve True"),
        (["--enable-quant-communications"], "--enable-quant-communications True"),
        (["--enable-w4a4-mxfp4-megamoe"], "--enable-w4a4-mxfp4-megamoe True"),
        (["--enable-tf32-matmul"], "--enable-tf32-matmul True"),
        (["--model-impl", "transformers"], "--model-impl transformers"),
        (["--mamba-ssm-dtype", "bfloat16"], "--mamba-ssm-dtype bfloat16"),
        (["--attention-backend", "triton"], "--attention-backend triton"),
        (["--decrypted-config-file", "other.json"], "it replaces the model of model.path"),
        (["--kt-weight-path", "x"], "it replaces the model of model.path"),
        (["--custom-weight-loader", "a.b"], "it replaces the model of model.path"),
        (["--json-model-override-args", '{"rope_theta": 1}'], "it replaces the model"),
        (["--load-format", "dummy"], "it replaces the model of model.path"),
        (["--enable-lora", "--lora-paths", "adapter"], "merge it first"),
        (["--speculative-algorithm", "EAGLE3"], "a drafter's passes"),
        (["--forward-hooks", "[]"], "the capture key would not tell"),
        (["--startup-weight-load-mode", "overlap"], "must stay as they were checked"),
    ],
)
def test_a_server_with_a_setting_that_the_key_does_not_name_is_refused(
    given: list[str], named: str
) -> None:
    """A server of others is started by other hands: the plug-in asks what it was given."""
    assert named in refused(*given)


def test_a_setting_in_the_key_must_be_the_servers_and_only_that() -> None:
    key = {"engine_args": ("--kv-cache-dtype", "fp8_e4m3")}
    numbers.check_arguments(server_args(*key["engine_args"]), spec=spec_with(**key))
    assert "--kv-cache-dtype auto, expected fp8_e4m3" in refused(**key)
    assert "--kv-cache-dtype fp8_e5m2, expected fp8_e4m3" in refused(
        "--kv-cache-dtype", "fp8_e5m2", **key
    )


def test_made_up_weights_need_a_capture_of_made_up_weights() -> None:
    made_up = spec_with(model_digest=numbers.MADE_UP)
    numbers.check_arguments(server_args("--load-format", "dummy"), spec=made_up)


def test_arguments_that_are_resolved_in_place_are_remembered_before() -> None:
    """SGLang 0.5.17 resolves them in the record itself."""
    record = SimpleNamespace(**vars(arguments.parse(["--device", "cuda"])))
    numbers.remember_arguments(record)
    record.attention_backend = "fa3"
    numbers.check_arguments(record, spec=capture_spec())
    unknown = SimpleNamespace(**vars(arguments.parse([])))
    with pytest.raises(numbers.Refused, match="what they were is not known"):
        numbers.check_arguments(unknown, spec=capture_spec())


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("DRAFTSTATES_GIVEN_VARIABLES", "DRAFTSTATES_SERVER"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    return monkeypatch


def test_numeric_variables_of_the_server_are_those_of_the_key(start: pytest.MonkeyPatch) -> None:
    start.setenv("NVIDIA_TF32_OVERRIDE", "1")
    numbers.remember_start()
    # what SGLang sets for itself afterwards is its own
    start.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")
    numbers.remember_start()
    numbers.check_variables(spec=spec_with(engine_env=("NVIDIA_TF32_OVERRIDE=1",)))
    for key in ((), ("NVIDIA_TF32_OVERRIDE=0",)):
        with pytest.raises(numbers.Refused, match="has NVIDIA_TF32_OVERRIDE=1, expected"):
            numbers.check_variables(spec=spec_with(engine_env=key))


@pytest.mark.parametrize("key", [(), ("DUMPER_SOURCE_PATCHER_CONFIG=x",)])
def test_a_server_that_is_patched_is_refused_though_the_key_names_it(
    start: pytest.MonkeyPatch, key: tuple[str, ...]
) -> None:
    start.setenv("DUMPER_SOURCE_PATCHER_CONFIG", "x")
    numbers.remember_start()
    with pytest.raises(numbers.Refused, match="it changes the server's program"):
        numbers.check_variables(spec=spec_with(engine_env=key))


def test_an_unknown_variable_of_the_engine_is_refused(start: pytest.MonkeyPatch) -> None:
    start.setenv("SGLANG_OF_TOMORROW", "1")
    numbers.remember_start()
    with pytest.raises(numbers.Refused, match="has SGLANG_OF_TOMORROW=1, expected None: put"):
        numbers.check_variables(spec=spec_with())
    numbers.check_variables(spec=spec_with(engine_env=("SGLANG_OF_TOMORROW=1",)))


def test_all_ranks_of_a_server_have_one_name(start: pytest.MonkeyPatch) -> None:
    numbers.remember_start()
    first = numbers.server_name()
    numbers.remember_start()
    assert numbers.server_name() == first
    # a rank is a process that the first process started
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        numbers.remember_start()
        os.write(writing, numbers.server_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 99).decode() == first


@pytest.mark.parametrize(
    "left", ["{pid}:1:{name}", "4194999:{started}:{name}", "{name}", "", "x:y:{name}"]
)
def test_what_another_server_left_in_the_environment_does_not_count(
    start: pytest.MonkeyPatch, left: str
) -> None:
    numbers.remember_start()
    pid, started, name = os.environ["DRAFTSTATES_SERVER"].split(":")
    start.setenv("DRAFTSTATES_SERVER", left.format(pid=pid, started=started, name=name))
    start.setenv("DRAFTSTATES_GIVEN_VARIABLES", "{}")
    start.setenv("NVIDIA_TF32_OVERRIDE", "1")
    numbers.remember_start()
    assert numbers.server_name() != name
    with pytest.raises(numbers.Refused, match="has NVIDIA_TF32_OVERRIDE=1, expected None"):
        numbers.check_variables(spec=spec_with())


def test_a_configuration_that_is_not_the_models_own_is_refused(tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    asked = server_args("--model-path", str(folder))
    held = ModelConfig(str(folder), dtype="float32", trust_remote_code=False)
    compared = numbers.check_configuration(asked, held)
    keys = set(held.hf_config.to_dict()) - numbers._FROM_ARGUMENTS
    assert compared.startswith(f"{len(keys)} keys as in the model's, sha256 ")
    assert compared == numbers.check_configuration(asked, held)
    for key, value in (("rope_theta", 5.0), ("rms_norm_eps", 0.5), ("of_another", 1)):
        other = ModelConfig(
            str(folder), dtype="float32", model_override_args=json.dumps({key: value})
        )
        with pytest.raises(numbers.Refused, match=f"{key}"):
            numbers.check_configuration(asked, other)
    decrypted = tmp_path / "decrypted.json"
    decrypted.write_text(json.dumps({**LLAMA, "num_key_value_heads": 1}))
    other = ModelConfig(str(folder), dtype="float32", override_config_file=str(decrypted))
    with pytest.raises(numbers.Refused, match="it computes with num_key_value_heads: 1, but"):
        numbers.check_configuration(asked, other)
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_key_value_heads": 1}))
    held = ModelConfig(str(folder), dtype="float32", trust_remote_code=False)
    asked = server_args("--model-path", str(folder))
    assert numbers.check_configuration(asked, held) != compared
