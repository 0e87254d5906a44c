"""The context length of a server of the target model.

Every run of Snakemake asks for it, so this module imports no numpy.
"""

from collections.abc import Sequence

from draftstates.config import Configuration
from draftstates.engine import flags
from draftstates.model.folder import ModelFolder


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
    named = flags.context_length(server_args)
    return model.context_length if named is None else named
