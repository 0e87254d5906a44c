"""Loading a model's tokenizer so that it gives the ids that the model was trained on."""

from pathlib import Path
from typing import Any

import tokenizers

from draftstates.errors import UserError

_CHECK = "  Two  spaces\n\n\tand a tab, 12345.67 «été» naïve don't I'LL 日本語 한국어 हिन्दी 👩‍👩‍👧 ſ \u00a0 e\u0301 <|x|> \r\n end "


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder.

    transformers 5 rebuilds some tokenizers by the class that their configuration names and drops what `tokenizer.json` says: DeepSeek-V3's,
    called a Llama tokenizer, loses every newline. What the file says is put back, and the two are compared.

    Raises:
        UserError: there is no tokenizer that can be loaded, or the two still differ.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: expected the folder of a model or tokenizer, found none")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever it meets in files of another kind, or in a tokenizer's own code
        raise UserError(f"{folder}: expected a tokenizer that transformers can load: {error}") from error
    file = folder / "tokenizer.json"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.exists():
        return tokenizer
    published = tokenizers.Tokenizer.from_file(str(file))
    for part in ("normalizer", "pre_tokenizer", "model", "decoder"):
        setattr(backend, part, getattr(published, part))
    if backend.encode(_CHECK, add_special_tokens=False).ids != published.encode(_CHECK, add_special_tokens=False).ids:
        raise UserError(f"{folder}: transformers loads another tokenizer than tokenizer.json holds: the ids of a text differ")
    return tokenizer
