"""The key of answers: a hash of all that decides what the target model answers to a prompt."""

import hashlib
import json

from draftstates.config import Configuration
from draftstates.errors import UserError
from draftstates.model.digest import model_digest
from draftstates.model.folder import ModelFolder

# keys of `answers` that decide which answers are kept, or how they are made, and no answer itself
_NOT_IN_KEY = {"skip_degenerate", "chunk", "in_flight"}


def answers_folder(config: Configuration, source: str) -> str:
    """Return the name of the folder of a source's answers, `<model>-<8 digits of the key>`.

    Other sampling, another model or another seed gives another folder. What a prompt is does not
    enter: each prompt has an id of its own.

    Args:
        config: the resolved configuration.
        source: name of a source with `answers`.

    Raises:
        UserError: the model cannot be read.
    """
    model, answers = ModelFolder(config.model.path), config.data.source(source).answers
    if answers is None:
        raise UserError(f"data.sources: source {source} has no key answers")
    fields = {
        "model": model_digest(model),
        "compute_dtype": config.capture.compute_dtype,
        "quantization": model.quantization,
        "engine_args": config.model.engine_args,
        "engine_env": config.model.engine_env,
        "answers": answers.model_dump(exclude=_NOT_IN_KEY),
        "max_tokens": config.data.max_tokens,
    }
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return f"{config.model.name}-{digest[:8]}"
