"""The context length of a server of the target model.

Every run of Snakemake asks for it, so this module imports no numpy.
"""

import itertools
from collections.abc import Sequence

from draftstates.config import Configuration
from draftstates.model.folder import ModelFolder

CONTEXT_FLAG = "--context-length"
# keys of config.json in the order in which SGLang asks for them
_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)


def server_context(config: Configuration) -> int | None:
    """Return the context length of the servers that the configuration describes.

    It is None for a server that runs already, and while the model is missing.
    """
    model = ModelFolder(config.model.path)
    if config.server.launcher == "external" or not model.exists():
        return None
    return context_length(model, config.server.args)


def context_length(model: ModelFolder, server_args: Sequence[str]) -> int | None:
    """Return the tokens that the server takes, prompt and one new token together.

    Args:
        model: the target model.
        server_args: `server.args` of the configuration.

    Returns:
        The length that the arguments name, else the model's; None where neither names one.
    """
    named = [
        value
        for flag, value in itertools.pairwise(server_args)
        if flag.replace("_", "-") == CONTEXT_FLAG
    ]
    named += [
        argument.partition("=")[2]
        for argument in server_args
        if argument.replace("_", "-").startswith(f"{CONTEXT_FLAG}=")
    ]
    if named and named[-1].isdigit():
        return int(named[-1])
    text = model.text
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = 1
    if scaling and "original_max_position_embeddings" not in scaling:
        factor = scaling.get("factor", 1)
    if scaling.get("rope_type") == "llama3":
        factor = 1
    found = next((text[key] for key in _KEYS if text.get(key) is not None), None)
    return None if found is None else int(factor * found)
