"""SGLang's flags: what `server.args` takes, what enters the capture key, and what is refused."""

import pytest

from draftstates.engine import flags

# Each of these got past the list of forbidden flags that stood here before.
CHANGE_NUMBERS = (
    "--quantization fp8",
    "--kv-cache-dtype fp8_e4m3",
    "--modelopt-quant fp8",
    "--quantize-and-serve",
    "--enable-quant-communications",
    "--enable-w4a4-mxfp4-megamoe",
    "--enable-tf32-matmul",
    "--model-impl transformers",
    "--mamba-ssm-dtype bfloat16",
    "--attention-backend triton",
    "--moe-runner-backend triton",
    "--enable-torch-compile",
    "--rl-on-policy-target fsdp",
)
REFUSED = (
    ("--decrypted-config-file other.json", "it replaces the model of model.path"),
    ("--json-model-override-args {}", "it replaces the model of model.path"),
    ("--load-format dummy", "it replaces the model of model.path"),
    ("--kt-weight-path experts", "it replaces the model of model.path"),
    ("--custom-weight-loader mine.load", "it replaces the model of model.path"),
    ("--enable-lora", "merge it first, with `python -c"),
    ("--lora-paths adapter", "merge it first, with `python -c"),
    ("--speculative-algorithm EAGLE3", "a drafter's passes are not the target model's"),
    ("--forward-hooks []", "the capture key would not tell"),
    ("--debug-tensor-dump-input-file x", "the capture key would not tell"),
    ("--disaggregation-mode prefill", "must be in one server"),
    ("--pp-size 2", "a pipeline parallel server cannot be captured"),
    ("--trust-remote-code", "use model.trust_remote_code"),
    ("--enable-two-batch-overlap", "rows would be wrong or missing"),
    ("--attn-cp-size 2", "rows would be wrong or missing"),
    ("--enable-hierarchical-cache", "rows that a cache holds are not computed"),
    ("--cuda-graph-backend-prefill full", "rows cannot be taken from a replayed graph"),
    ("--weight-cache-mode client", "it replaces the model of model.path"),
    ("--enable-memory-saver", "must stay as they were checked"),
    # abbreviations, which SGLang accepts
    ("--decrypted-config x", "it replaces the model of model.path"),
    ("--enable-lor", "merge it first"),
    ("--tensor-parallel 2", "use server.tensor_parallel"),
    ("--trust-remote", "use model.trust_remote_code"),
)


@pytest.mark.parametrize("flag", CHANGE_NUMBERS)
def test_a_flag_that_changes_numbers_enters_the_key_and_stands_nowhere_else(flag: str) -> None:
    (problem,) = flags.server_problems(flag.split())
    assert "put it into model.engine_args, which enter the" in problem
    assert flags.engine_problems(flag.split()) == []


@pytest.mark.parametrize(("flag", "reason"), REFUSED)
def test_a_flag_that_makes_a_capture_wrong_is_refused_everywhere(flag: str, reason: str) -> None:
    for problems in (flags.server_problems, flags.engine_problems):
        (problem,) = problems(flag.split())
        assert problem.startswith(f"{flag.split()[0]} is not accepted here: ")
        assert reason in problem


def test_a_flag_that_is_in_no_list_is_not_taken_by_server_args() -> None:
    """What a later SGLang adds may change numbers."""
    (problem,) = flags.server_problems(["--flag-of-tomorrow", "1"])
    assert "none of SGLang's flags that schedule, place, size or log" in problem


def test_flags_that_schedule_place_size_or_log_are_taken_in_either_spelling() -> None:
    taken = ["--max-total-tokens", "16384", "--mem-fraction-static=0.8", "--log_level", "info"]
    assert flags.server_problems(taken) == []
    problem, *others = flags.engine_problems(taken)
    assert len(others) == 2
    assert "--max-total-tokens is not accepted here: it changes no numbers" in problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--max-total-tokens 16384"],
            'found \'--max-total-tokens 16384\': write ["--max-total-tokens", "16384"]',
        ),
        (["--log-level info --max-total-tokens 4"], "each value as a string of its own"),
        (["16384"], "expected a flag such as --log-level, found '16384'"),
    ],
)
def test_a_flag_and_its_value_in_one_string_are_refused(arguments: list[str], message: str) -> None:
    for problems in (flags.server_problems, flags.engine_problems):
        (problem,) = problems(arguments)
        assert message in problem


def test_equal_arguments_have_one_spelling_and_order() -> None:
    one = flags.canonical(["--kv-cache-dtype=fp8_e4m3", "--enable_tf32_matmul"])
    other = flags.canonical(["--enable-tf32-matmul", "--kv-cache-dtype", "fp8_e4m3"])
    assert one == other == ["--enable-tf32-matmul", "--kv-cache-dtype", "fp8_e4m3"]


def test_a_flag_given_twice_is_refused() -> None:
    """SGLang takes the last one, and the order would decide."""
    twice = ["--kv-cache-dtype", "auto", "--kv-cache-dtype", "fp8_e4m3"]
    assert flags.engine_problems(twice) == ["--kv-cache-dtype is given 2 times"]


def test_a_servers_flags_fall_apart_into_those_of_the_key_and_those_of_server_args() -> None:
    given = "--device cpu --attention-backend triton --max-total-tokens 8 --load-format dummy"
    assert flags.numeric(given.split()) == ["--attention-backend", "triton"]
    assert flags.placing(given.split()) == ["--max-total-tokens", "8"]


@pytest.mark.parametrize("given", [["--help"], ["-h"], ["--log-level", "info", "-h"], ["--hel"]])
def test_a_flag_that_starts_no_server_is_refused(given: list[str]) -> None:
    for problems in (flags.server_problems, flags.engine_problems):
        assert any("it prints a help text and starts no server" in each for each in problems(given))


def test_a_negative_number_is_a_value() -> None:
    assert flags.split(["--seconds", "-1"]) == [("--seconds", ["-1"])]


@pytest.mark.parametrize(
    "given",
    [
        ["--enable-tf32-matmul", "--no-enable-tf32-matmul"],
        ["--no-enable-tf32-matmul", "--enable-tf32-matmul"],
        ["--enable-torch-compile", "--disable-torch-compile"],
        ["--disable-custom-all-reduce", "--no-disable-custom-all-reduce"],
    ],
)
def test_flags_that_contradict_each_other_are_refused(given: list[str]) -> None:
    for problems in (flags.server_problems, flags.engine_problems):
        said = f"{' and '.join(given)} contradict each other: keep one of them"
        assert said in problems(given)


def test_other_flags_of_one_subject_do_not_contradict_each_other() -> None:
    assert flags.engine_problems(["--enable-of-tomorrow", "--of-tomorrow", "2"]) == []


@pytest.mark.parametrize("value", ["/tuned.bin", "experts.pt", "~/x", "../x", '{"a":"/x"}'])
def test_a_flag_whose_value_names_a_file_is_refused(value: str) -> None:
    given = ["--init-expert-location", value]
    assert flags.engine_problems(given) == [
        "--init-expert-location is not accepted here: its value names a file, whose content the"
        " capture key does not cover"
    ]
    assert flags.engine_problems(["--init-expert-location", "trivial"]) == []
