"""Layers by the name of a published formula; SGLang's own function is the second opinion."""

import ast
import importlib.util
from pathlib import Path

import pytest

from draftstates.errors import UserError
from draftstates.model.layers import chosen_layers, dflash_layers, eagle3_layers


def test_eagle3_layers_are_2_half_and_n_minus_3() -> None:
    assert eagle3_layers(61) == (2, 30, 58)
    assert eagle3_layers(36) == (2, 18, 33)
    with pytest.raises(UserError, match="at least 7 layers"):
        eagle3_layers(6)


def test_dflash_layers_are_one_above_the_published_outputs() -> None:
    """z-lab's Qwen3-8B-DFlash reads the outputs of layers 1, 9, 17, 25 and 33 of 36."""
    assert dflash_layers(36, 5) == (2, 10, 18, 26, 34)
    assert dflash_layers(36, 1) == (19,)
    # 1 + 1.5 is rounded to the even number 2
    assert dflash_layers(7, 3) == (2, 3, 5)
    assert chosen_layers({"dflash": 5}, num_layers=36) == dflash_layers(36, 5)


@pytest.mark.parametrize(("num_layers", "drafted"), [(3, 1), (7, 5), (36, 34)])
def test_dflash_refuses_a_model_with_too_few_layers(num_layers: int, drafted: int) -> None:
    with pytest.raises(UserError, match=f"dflash with {drafted} layers .* {drafted + 3} layers"):
        dflash_layers(num_layers, drafted)


def test_dflash_layers_are_those_that_sglang_computes() -> None:
    """Its function is taken out of the file: an import of the whole module takes 20 seconds."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("sglang is not installed here")
    file = Path(found.submodule_search_locations[0], "srt/speculative/dflash_utils.py")
    functions = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
    (theirs,) = (each for each in functions if each.name == "build_target_layer_ids")
    names = {"List": list}
    exec(compile(ast.Module([theirs], []), str(file), "exec"), names)
    for num_layers in range(4, 96):
        for drafted in range(1, num_layers - 2):
            outputs = names["build_target_layer_ids"](num_layers, drafted)
            assert dflash_layers(num_layers, drafted) == tuple(i + 1 for i in outputs)
