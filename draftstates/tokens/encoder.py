"""The loader of a model's tokenizer, and encoders that give exactly the `tokenizers` library's ids.

Encoding has a shortcut, several times as fast as the library. A byte-level BPE tokenizer splits
text into words by a regular expression and merges within each word. Most words of a text occurred
in earlier texts. So the shortcut splits by the same expression and looks each word up; the library
merges only the new words. The shortcut is for tokenizers that consist of exactly these steps. The
library encodes with any other tokenizer. The library also encodes any text with a character that
the two regular expression engines might treat in different ways.
"""

import json
import re
import unicodedata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import regex
import tokenizers

from draftstates.errors import UserError

_CHECK = (
    "  Two  spaces\n\n\tand a tab, 12345.67 «été» naïve don't I'LL 日本語 한국어 हिन्दी 👩‍👩‍👧 ſ"
    " \u00a0 e\u0301 <|x|> \r\n end "
)
# the expression by which ByteLevel splits with `use_regex`
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTEXTS = (
    "{c}|a{c}b{c}A{c}|1{c}1 {c}1|!{c}! {c}!{c}|\n{c}\n{c} \t{c}\t{c}\r{c}|'{c}'{c}s {c}{c}  {c}a "
    " {c}1|{c} {c}\n{c}\n|I'{c} '{c}e'l{c}|" + "{c}"
)
_WORDS = 1 << 16
_PIECE_CHARACTERS = 1 << 22
_LONGEST_WORD = 1 << 10
# the library encodes one text of this many too, to compare the ids
_CHECKED = 512


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer in a folder.

    transformers 5 rebuilds some tokenizers by the class that their configuration names and drops
    parts of `tokenizer.json`: DeepSeek-V3's, called a Llama tokenizer, loses every newline. This
    function restores these parts from the file, and compares the ids that both give.

    Raises:
        UserError: the folder has no tokenizer that can be loaded, or the ids still differ.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: expected the folder of a model or tokenizer, found none")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # files of another kind, or a tokenizer's own code, can raise any error
        raise UserError(
            f"{folder}: expected a tokenizer that transformers can load: {error}"
        ) from error
    file = folder / "tokenizer.json"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.exists():
        return tokenizer
    published = tokenizers.Tokenizer.from_file(str(file))
    for part in ("normalizer", "pre_tokenizer", "model", "decoder"):
        setattr(backend, part, getattr(published, part))
    if (
        backend.encode(_CHECK, add_special_tokens=False).ids
        != published.encode(_CHECK, add_special_tokens=False).ids
    ):
        raise UserError(
            f"{folder}: transformers loads another tokenizer than tokenizer.json holds: the ids of"
            " a text differ"
        )
    return tokenizer


class OddCharacterError(Exception):
    """A character that the two regular expression engines may treat in different ways."""


class Encoder(Protocol):
    """An encoder of text to ids."""

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 [T], without added tokens.

        Raises:
            UnicodeEncodeError: the text has lone surrogates.
        """


class PlainEncoder:
    """The `tokenizers` library itself."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def encode(self, text: str) -> np.ndarray:
        # raises for lone surrogates
        text.encode()
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)


class PythonEncoder:
    """A tokenizer written in Python, such as Kimi's around tiktoken.

    It is called as SGLang calls it: with `add_special_tokens=False` only where the tokenizer would
    add tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._encode = tokenizer.encode
        self._arguments = {"add_special_tokens": False} if tokenizer.encode("") else {}

    def encode(self, text: str) -> np.ndarray:
        # raises for lone surrogates
        text.encode()
        return np.array(self._encode(text, **self._arguments), dtype=np.int32)


class WordEncoder:
    """The shortcut; `encoder_for` makes it, for tokenizers of the right kind only."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        patterns: list[str],
        normalised: bool,
        marks: list[dict[str, int]],
    ) -> None:
        self._plain = PlainEncoder(backend)
        self._normalised = normalised
        self._words = _Words(backend, patterns)
        self._marks = {
            mark: np.int32(token).tobytes() for kind in marks for mark, token in kind.items()
        }
        self._mark_splits = [_any_of(kind).split for kind in marks if kind]
        self._pieces: dict[str, bytes] = {}
        self._pieces_characters = 0
        self._count = 0

    def encode(self, text: str) -> np.ndarray:
        try:
            parts = [self._marks.get(piece) or self._piece(piece) for piece in self._split(text)]
        except OddCharacterError:
            return self._plain.encode(text)
        ids = np.frombuffer(b"".join(parts), dtype=np.int32)
        self._count += 1
        if self._count % _CHECKED == 1 and not np.array_equal(ids, self._plain.encode(text)):
            raise AssertionError(f"the quick and the plain way of tokenising differ for {text!r}")
        return ids

    def _split(self, text: str) -> list[str]:
        """Split a text into marks and the pieces between them.

        Each kind of marks splits the text after the kind before it, as in the library.
        """
        pieces = [text]
        for split in self._mark_splits:
            pieces = [
                part
                for piece in pieces
                for part in ((piece,) if piece in self._marks else split(piece))
                if part
            ]
        return pieces

    def _piece(self, piece: str) -> bytes:
        """Return the ids of a piece between marks, as bytes.

        Every turn of a conversation repeats the history, so pieces are kept for a while.
        """
        found = self._pieces.get(piece)
        if found is None:
            if (
                self._normalised
                and not piece.isascii()
                and not unicodedata.is_normalized("NFC", piece)
            ):
                raise OddCharacterError
            found = b"".join(map(self._words.__getitem__, self._words.split(piece)))
            if self._pieces_characters > _PIECE_CHARACTERS:
                self._pieces.clear()
                self._pieces_characters = 0
            self._pieces[piece] = found
            self._pieces_characters += len(piece)
        return found


class _Words(dict[str, bytes]):
    """Words and their ids as int32 bytes.

    When the words are too many, the older half of those not used lately is dropped.
    """

    def __init__(self, backend: tokenizers.Tokenizer, patterns: list[str]) -> None:
        super().__init__()
        self._merge = backend.model.tokenize
        self._pre_tokenizer = backend.pre_tokenizer
        self._outer = [regex.compile(f"({pattern})") for pattern in patterns[:-1]]
        self._inner, self._inner_split = (
            regex.compile(patterns[-1]),
            regex.compile(f"({patterns[-1]})"),
        )
        self._byte_marks = _byte_marks()
        self._older: dict[str, bytes] = {}
        self._vouched: set[str] = set()

    def split(self, text: str) -> list[str]:
        """Split a text into words; the text between two matches is a word too."""
        parts = [text]
        for pattern in self._outer:
            parts = [part for whole in parts for part in pattern.split(whole) if part]
        words = []
        for part in parts:
            found = self._inner.findall(part)
            words += (
                found
                if "".join(found) == part
                else [word for word in self._inner_split.split(part) if word]
            )
        return words

    def __missing__(self, word: str) -> bytes:
        ids = self._older.get(word)
        if ids is None:
            for character in set(word) - self._vouched:
                self._vouch(character)
            ids = np.array(
                [token.id for token in self._merge(self._as_marks(word))], dtype=np.int32
            ).tobytes()
        if len(word) > _LONGEST_WORD:
            return ids
        if len(self) >= _WORDS:
            self._older = dict(self)
            self.clear()
        self[word] = ids
        return ids

    def _as_marks(self, word: str) -> str:
        return "".join(map(self._byte_marks.__getitem__, word.encode()))

    def _vouch(self, character: str) -> None:
        """Refuse a character that the two engines split differently beside characters of any kind.

        The engines know different versions of Unicode.
        """
        text = _CONTEXTS.replace("{c}", character)
        theirs = [word for word, _ in self._pre_tokenizer.pre_tokenize_str(text)]
        if unicodedata.category(character) == "Cn" or theirs != list(
            map(self._as_marks, self.split(text))
        ):
            raise OddCharacterError
        self._vouched.add(character)


def _byte_marks() -> dict[int, str]:
    """Return the printable character that byte-level BPE writes for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def encoder_for(tokenizer: Any) -> Encoder:
    """Return the fastest encoder that is exact for a transformers tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return PythonEncoder(tokenizer)
    patterns, normalised = (
        _patterns(_state(backend.pre_tokenizer)),
        _normalised(_state(backend.normalizer)),
    )
    tokens = backend.get_added_tokens_decoder()
    plain_marks = not any(
        token.lstrip or token.rstrip or token.single_word for token in tokens.values()
    )
    marks = [
        {token.content: key for key, token in tokens.items() if token.normalized is kind}
        for kind in (False, True)
    ]
    if (
        patterns is None
        or normalised is None
        or not _plain_bpe(backend.model)
        or not plain_marks
        or (normalised and marks[1])
    ):
        return PlainEncoder(backend)
    return WordEncoder(backend, patterns=patterns, normalised=normalised, marks=marks)


def _state(part: Any) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer as `tokenizer.json` describes it."""
    return None if part is None else json.loads(part.__getstate__())


def _any_of(marks: dict[str, int]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")")


def _plain_bpe(model: Any) -> bool:
    extras = (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
    )
    return isinstance(model, tokenizers.models.BPE) and not any(
        getattr(model, extra) for extra in extras
    )


def _normalised(normalizer: dict[str, Any] | None) -> bool | None:
    """Return whether the normalizer is NFC (True) or missing (False); None for any other."""
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if any(step["type"] != "NFC" for step in steps):
        return None
    return bool(steps)


def _patterns(pre_tokenizer: dict[str, Any] | None) -> list[str] | None:
    """Return the expressions by which text is split, one after the other.

    Return None for a pre-tokenizer that does anything else.
    """
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    patterns = []
    for step in steps[:-1]:
        pattern = step.get("pattern", {}).get("Regex")
        if (
            step["type"] != "Split"
            or step["behavior"] != "Isolated"
            or step["invert"]
            or pattern is None
        ):
            return None
        patterns.append(pattern)
    if steps[-1]["use_regex"]:
        patterns.append(_GPT2)
    if any(regex.compile(pattern).groups for pattern in patterns):
        return None
    return patterns or None
