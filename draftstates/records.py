"""Records that travel between the stages, and the documents that hold them.

The documents are the prompts of a source, the plan, a shard's receipts, the findings of
verification, and the manifest.

Jobs that read them start by the thousand, so this module imports neither numpy nor torch.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import PlainSerializer, WrapValidator

from draftstates.documents import Document, InvalidField, Items, Record, sealed
from draftstates.errors import UserError, capture_again, make_again
from draftstates.files import first_difference, sync
from draftstates.paths import Capture
from draftstates.spec import CaptureSpec

# step to file names of container images, None for the host
Images = dict[str, Items[str | None]]
PLAN_AGAIN = "run: snakemake --cores all --forcerun plan"


def _check_key(document: Any, read: Callable[[Any], CaptureSpec]) -> CaptureSpec:
    spec = read(document)
    if (found := document.get("key")) != spec.key:
        raise InvalidField(f"expected {spec.key}, the key of the fields, found {found}", "key")
    return spec


# the spec's fields and their key
_Capture = Annotated[CaptureSpec, WrapValidator(_check_key), PlainSerializer(CaptureSpec.document)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptChunk(Record):
    """Prompts that one job answers: the rows `first` to `end` of the source's file of prompts."""

    chunk_id: str
    first: int
    end: int
    prompts: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts(Document):
    """The prompts of a source, cut into chunks.

    Attributes:
        source: the source's name.
        rows: rows that were read.
        renderer: what rendered the prompts.
        data: data set of the hub and its commit; empty for files.
    """

    FORMAT = "draftstates.prompts"
    VERSION = 2
    WHAT = "a source's prompts"
    SEALED = True

    source: str
    rows: int
    renderer: str
    chunks: Items[PromptChunk]
    data: str = ""

    @classmethod
    def remedy(cls, path: Path) -> str:
        return "run: snakemake --cores all --forcerun prompts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswersAccount(Record):
    """The prompts of a source that the target model answered, and figures of its answers.

    Attributes:
        prompts: prompts that were asked.
        answered: prompts that gave a sample.
        skipped: prompts that gave none, by reason.
        answers: answers, of all turns and samples.
        finish: answers by the reason why they end: `stop`, or `length` where they are cut.
        degenerate: degenerate answers by kind.
        lengths: least, median, 0.9-quantile and greatest number of sampled tokens.
        sampled_tokens: tokens of all answers.
        prompt_tokens: tokens that were sent.
        cached_tokens: those of them whose rows the server had already.
        seconds: time in which jobs were answering, several at once or not.
        timed_tokens: tokens that they sampled; a job that was killed is not timed.
    """

    prompts: int
    answered: int
    skipped: dict[str, int]
    answers: int
    finish: dict[str, int]
    degenerate: dict[str, int]
    lengths: dict[str, int]
    sampled_tokens: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    timed_tokens: int = 0

    @property
    def truncated(self) -> float:
        """Share of the answers that are cut at their most tokens."""
        return self.finish.get("length", 0) / max(self.answers, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceAccount(Record):
    """Rows of a source, or of all sources, and what became of them.

    Attributes:
        rows_in: rows that were read.
        kept: rows that gave at least one sample.
        samples: samples of the kept rows.
        skipped: skipped rows by reason.
        failed: failed rows by reason.
        not_used: kept rows by the name of a column, key or kind of content that is in none of
            their samples.
        renderer: what rendered the conversations; empty for all sources together.
        data: data set of the hub and its commit; empty for files.
        answers: of answers by the target model; None for the data's own.
    """

    rows_in: int
    kept: int
    samples: int
    skipped: dict[str, int]
    failed: dict[str, int]
    tokens: int
    supervised_tokens: int
    not_used: dict[str, int] = dataclasses.field(default_factory=dict)
    renderer: str = ""
    data: str = ""
    answers: AnswersAccount | None = None

    def check(self, name: str) -> None:
        """Refuse an account that does not close (promise 1).

        Args:
            name: whose account it is, for the message.

        Raises:
            UserError: rows in are not kept + skipped + failed.
        """
        skipped, failed = sum(self.skipped.values()), sum(self.failed.values())
        if self.rows_in != self.kept + skipped + failed:
            raise UserError(
                f"{name}: unexplained rows: {self.rows_in:,} in, but {self.kept:,} kept +"
                f" {skipped:,} skipped + {failed:,} failed"
            )
        asked = self.answers
        if asked and asked.prompts != asked.answered + sum(asked.skipped.values()):
            raise UserError(
                f"{name}: unexplained prompts: {asked.prompts:,} in, but {asked.answered:,}"
                f" answered + {sum(asked.skipped.values()):,} skipped"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accounting(Record):
    """Accounts of each source by its name, and of all sources together."""

    sources: dict[str, SourceAccount]
    totals: SourceAccount

    def check(self) -> None:
        """Refuse accounts that do not close (promise 1) or do not add up to the totals.

        Raises:
            UserError: an account does not close, or the sources do not add up to the totals.
        """
        for name, account in self.sources.items():
            account.check(f"source {name}")
        self.totals.check("all sources")
        for field in ("samples", "tokens", "supervised_tokens"):
            counted = getattr(self.totals, field)
            in_sources = sum(getattr(account, field) for account in self.sources.values())
            if in_sources != counted:
                raise UserError(
                    f"unexplained rows: {counted:,} {field} in all, the sources have"
                    f" {in_sources:,}; {PLAN_AGAIN}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedShard(Record):
    """A shard that the plan asks for.

    Attributes:
        bytes: size of its file without the header.
        shared_tokens: tokens whose rows are those of an earlier sample, and stored once.
        answered: whether its supervised tokens are the target model's own, each of which
            verification compares with the captured states.
    """

    shard_id: str
    source: str
    samples: int
    tokens: int
    supervised_tokens: int
    bytes: int
    shared_tokens: int = 0
    answered: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedChecks(Record):
    """The configuration's `checks`: how many samples of a shard are captured again as a prefix.

    Attributes:
        recapture_fraction: share of the captured samples.
        recapture_minimum: least number of samples of a shard.
        answers: largest difference of a sampled token's log probability; None for that of the
            number format.
    """

    recapture_fraction: float
    recapture_minimum: int
    answers: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Document):
    """The shards to capture, and what became of every row.

    Attributes:
        capture_folder: name of the folder below the results.
        images: images of the steps up to the plan.
        bytes_needed: bytes of the shards that were missing when the plan was made.
        bytes_present: bytes of the shards that were already captured then.
        disk_free: free bytes of the disk then.
    """

    FORMAT = "draftstates.plan"
    WHAT = "a plan"
    SEALED = True

    capture_folder: str
    capture: _Capture
    checks: PlannedChecks
    shards: Items[PlannedShard]
    accounting: Accounting
    images: Images
    bytes_needed: int
    bytes_present: int
    disk_free: int

    @classmethod
    def remedy(cls, path: Path) -> str:
        return PLAN_AGAIN

    def shard(self, shard_id: str) -> PlannedShard:
        """Return the entry of a shard.

        Raises:
            UserError: the plan has no such shard.
        """
        for entry in self.shards:
            if entry.shard_id == shard_id:
                return entry
        raise UserError(f"shard {shard_id} is not in the plan: run snakemake --cores all")

    def check_capture_folder(self, folder: Path) -> None:
        """Refuse a capture folder to write to that is not the plan's.

        Raises:
            UserError: the folder is another one, as where another configuration was planned in
                the same results folder meanwhile.
        """
        if folder.absolute().name != self.capture_folder:
            raise UserError(
                f"{folder}: expected the plan's capture folder, {self.capture_folder}: another"
                " plan has replaced the plan; run snakemake --cores all"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(Record):
    """The engine that captured; `version` names several, separated by ", ", for copied rows."""

    name: str
    version: str

    @property
    def versions(self) -> set[str]:
        return set(self.version.split(", "))

    @classmethod
    def of(cls, engines: Iterable["Engine"]) -> "Engine":
        """Return several engines as one record."""
        engines = list(engines)
        names = sorted({engine.name for engine in engines})
        versions = sorted(set().union(*(engine.versions for engine in engines)))
        return cls(name=", ".join(names), version=", ".join(versions))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleReceipt(Record):
    """The server's receipt of one sample or prefix recapture, at its place in the file.

    Attributes:
        rows: rows that were written: the sample's own.
        cached_tokens: first tokens whose keys and values came from the radix cache; 0 of a copied
            sample.
        shared_rows: rows before them, which are an earlier sample's.
        chunks: prefill chunks that the rows came in.
        ids_hash: hash of the ids that the model read, which are those behind the cached ones.
        checksum: checksum of the rows at capture.
        prompt_tokens: tokens that the server counted; for a sample only.
        top: the most likely next tokens, [token id, log probability] each; for a sample only.
        attempts: requests that were needed; for a sample only.
        copied_from: shard that the rows were copied from.
        position: position of the recaptured sample in the shard; of a prefix recapture only.
        next_tokens: of each row, such pairs of the most likely next tokens and of the token that
            follows; of a prefix recapture only.
        again_rows: shared rows that were computed again and compared with the shard's: those of a
            chosen sample, and those for which a cache had no room.
        again_distance: largest distance of these (`draftstates.shards.distance`).
        namespace: namespace of the server's radix cache that the request read and filled; None of a
            server without one, and of a copied sample.
        last_state: final state of the last row in the stored dtype, in base64, where the shard
            holds no final states.
    """

    sample_id: str
    first_row: int
    rows: int
    chunks: int
    cached_tokens: int
    ids_hash: str
    checksum: str
    prompt_tokens: int | None = None
    top: list | None = None
    attempts: int | None = None
    copied_from: str | None = None
    position: int | None = None
    next_tokens: list | None = None
    shared_rows: int = 0
    namespace: str | None = None
    again_rows: int = 0
    again_distance: float = 0.0
    last_state: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardReceipts(Document):
    """The receipts of a shard's samples and of its prefix recaptures, in the order of the files.

    Attributes:
        selftests: ids of the self-test rows that the capturing servers agreed with.
    """

    FORMAT = "draftstates.receipts"
    WHAT = "a shard's receipts"

    shard_id: str
    capture_key: str
    engine: Engine
    images: Images
    samples: Items[SampleReceipt]
    recaptures: Items[SampleReceipt]
    selftests: Items[str] = ()

    @classmethod
    def remedy(cls, path: Path) -> str:
        return capture_again(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedSamples(Record):
    """The samples of a verified shard, a column each: a manifest has a million of them."""

    sample_id: Items[str]
    tokens: Items[int]
    supervised_tokens: Items[int]
    checksum: Items[str]

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in vars(self).items()}
        if len(set(lengths.values())) > 1:
            raise InvalidField(f"expected columns of one length, found {lengths}")

    def __len__(self) -> int:
        return len(self.sample_id)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures(Record):
    """The extent of the checks that passed, and the largest disagreements that they found.

    Attributes:
        alignment_share_of_limit: disagreement of log probabilities as a share of the limit.
        prefix_distance: median relative distance of a prefix recapture.
        answer_tokens: sampled tokens whose log probability was compared.
        answers_share_of_limit: largest disagreement of these as a share of the limit.
    """

    recaptures: int
    recaptured_tokens: int
    alignment_share_of_limit: float
    prefix_distance: float
    answer_tokens: int = 0
    answers_share_of_limit: float = 0.0

    @classmethod
    def of(cls, figures: Iterable["Figures"]) -> "Figures":
        """Return the figures of several shards together."""
        figures = list(figures)
        return cls(
            recaptures=sum(each.recaptures for each in figures),
            recaptured_tokens=sum(each.recaptured_tokens for each in figures),
            alignment_share_of_limit=max(each.alignment_share_of_limit for each in figures),
            prefix_distance=max(each.prefix_distance for each in figures),
            answer_tokens=sum(each.answer_tokens for each in figures),
            answers_share_of_limit=max(each.answers_share_of_limit for each in figures),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearLimit(Record):
    """A sample among those nearest to the limit of a check, and its share of that limit.

    Attributes:
        check: `alignment`, `prefix` or `answers`.
    """

    check: str
    sample_id: str
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSizes(Record):
    """Sizes of a layer's rows at a few positions of each sample, in counts that add up.

    Attributes:
        layer: `r_k`, or `final`.
        rows: number of rows.
        norm_sum: sum of their norms.
        norms: by position, rows by their norm n as 8 log2(n), rounded.
        largest: rows by the index of their largest component; the most frequent indices.
    """

    layer: str
    rows: int
    norm_sum: float
    norms: dict[str, dict[str, int]]
    largest: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified(Document):
    """The findings of verification in one shard that passed every check.

    Attributes:
        selftests: ids of the self-test rows that the capturing servers agreed with.
        worst: the samples nearest to a limit.
        sizes: sizes of rows by layer.
        answers_limit: `checks.answers` of a shard that was answered, as it was then.
    """

    FORMAT = "draftstates.verified"
    WHAT = "the findings of verification"
    SEALED = True

    shard_id: str
    capture_key: str
    engine: Engine
    images: Images
    bytes: int
    checksum: str
    samples: VerifiedSamples
    figures: Figures
    selftests: Items[str] = ()
    worst: Items[NearLimit] = ()
    sizes: Items[LayerSizes] = ()
    answers_limit: float | None = None

    @classmethod
    def remedy(cls, path: Path) -> str:
        return make_again("to verify the shard", path)

    def check(self, path: Path, *, planned: PlannedShard, capture_key: str) -> None:
        """Refuse findings that are not those of the planned shard.

        Args:
            path: file that they were read from.

        Raises:
            UserError: they are of another shard, capture or number of samples or tokens.
        """
        expected = {"capture_key": capture_key} | {
            name: getattr(planned, name)
            for name in ("shard_id", "samples", "tokens", "supervised_tokens")
        }
        found = {
            "capture_key": self.capture_key,
            "shard_id": self.shard_id,
            "samples": len(self.samples),
            "tokens": sum(self.samples.tokens),
            "supervised_tokens": sum(self.samples.supervised_tokens),
        }
        if planned.answered:
            expected["compared answer tokens"] = planned.supervised_tokens
            found["compared answer tokens"] = self.figures.answer_tokens
        if difference := first_difference(expected, found):
            raise UserError(f"{path}: {difference}; {self.remedy(path)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored(Document):
    """The compact form of a verified shard.

    Attributes:
        storage: how its states are stored; see `shards.compact.Storage`.
        captured_checksum: checksum of the captured file, which verification read.
        bytes: bytes of the compact file.
        checksum: checksum of the compact file.
        samples: checksum of each sample's states as stored, in order.
    """

    FORMAT = "draftstates.stored"
    VERSION = 1
    WHAT = "the record of a compact shard"
    SEALED = True

    shard_id: str
    capture_key: str
    storage: dict[str, Any]
    captured_checksum: str
    bytes: int
    checksum: str
    samples: Items[str]

    @classmethod
    def remedy(cls, path: Path) -> str:
        return capture_again(path)

    def check(self, path: Path, *, verified: Verified) -> None:
        """Refuse a compact form that was not made of the file that verification read.

        Args:
            path: file that this record was read from.

        Raises:
            UserError: it was made of another file.
        """
        expected = {
            "shard_id": verified.shard_id,
            "capture_key": verified.capture_key,
            "captured_checksum": verified.checksum,
            "samples": len(verified.samples),
        }
        found = {**vars(self), "samples": len(self.samples)}
        if difference := first_difference(expected, found):
            raise UserError(f"{path}: {difference}; {self.remedy(path)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerParity(Record):
    """Distances of one captured layer from the checkpoint's, each over the row's norm.

    Attributes:
        layer: `r_k`, or `post_norm` for what the final norm gives.
        rows: rows that were compared.
        median: median over rows, to the right layer.
        worst: largest over rows, to the right layer.
        limit: largest median that roundings explain.
        neighbours: by layer, the median over rows to the layers before and after.
        strays: share of rows that are nearer to a neighbouring layer.
        worst_limit: largest distance of any row; None where a router may let a row jump.
        alone: median over rows, to what the checkpoint's layer gives for the captured rows before
            it; None where that was not computed. So are the other fields of this name.
        alone_limit: largest such median that the roundings of one layer explain.
        alone_worst: largest over rows.
        alone_worst_limit: as worst_limit.
    """

    layer: str
    rows: int
    median: float
    worst: float
    limit: float
    neighbours: dict[str, float]
    strays: float
    worst_limit: float | None = None
    alone: float | None = None
    alone_limit: float | None = None
    alone_worst: float | None = None
    alone_worst_limit: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity(Document):
    """The comparison of a server's self-test with a forward pass of the checkpoint.

    Attributes:
        selftest: id of the self-test's rows that were compared.
        result: `all N layers`, `first m layers (reason)` or `none (reason)`.
        compared: number of decoder layers whose result was compared; 0 for none.
        layers: the distances of each layer, the larger one where several prompts have it.
        prompts: tokens of each prompt.
        covered: by key of `config.json`, lengths that the longest prompt goes beyond.
        beyond: by key, lengths that no prompt goes beyond: what depends on them is not compared.
        unreached: by layer, experts that no token of the prompt is given to: not compared.
        reference: what computed the reference, and in which dtype.
        asked: what the comparison was asked for, and a digest of the code that made it.
        seconds: how long it took.
    """

    FORMAT = "draftstates.parity"
    VERSION = 1
    WHAT = "a result of parity"
    SEALED = True

    capture_key: str
    selftest: str
    result: str
    compared: int
    layers: Items[LayerParity]
    prompts: Items[int]
    covered: dict[str, int]
    beyond: dict[str, int]
    reference: str
    asked: dict[str, str]
    seconds: float
    unreached: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def remedy(cls, path: Path) -> str:
        return make_again("to compare again", path)

    def require(self, mode: str) -> None:
        """Refuse a comparison of fewer than all layers where one is required.

        Args:
            mode: the configuration's `checks.parity`.

        Raises:
            UserError: a layer was not compared and `mode` is `required`.
        """
        if mode == "required" and not self.is_whole:
            raise UserError(
                f"checks.parity: required, but parity is {self.result}: capture a checkpoint that"
                " transformers can load, leave checks.parity_layers out, or set checks.parity: auto"
            )

    @property
    def is_whole(self) -> bool:
        """Whether every layer was compared."""
        return self.result.startswith("all ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestShard(PlannedShard):
    """A shard that a manifest lists: its path from the manifest, its file's bytes and checksum."""

    path: str
    checksum: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestTotals(SourceAccount):
    """The account of all sources, and the bytes of the shard files."""

    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Document):
    """The verified shards of a capture and the accounts of every row.

    Attributes:
        samples_checksum: checksum of the table of samples beside the manifest.
        parity: the comparison of the capturing servers with the checkpoint.
        storage: of compact shards, how they are stored.
    """

    FORMAT = "draftstates.manifest"
    VERSION = 3
    WHAT = "a manifest"
    SEALED = True

    capture: _Capture
    engine: Engine
    totals: ManifestTotals
    sources: dict[str, SourceAccount]
    checks: Figures
    images: Images
    shards: Items[ManifestShard]
    samples_checksum: str
    parity: Parity | None = None
    storage: dict | None = None

    @classmethod
    def remedy(cls, path: Path) -> str:
        return make_again("to write it again", path)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        capture = document.get("capture")
        if not isinstance(capture, dict):
            raise InvalidField(f"expected an object, found {capture!r}", "capture")
        engine = {"name": capture.get("engine"), "version": capture.get("engine_version")}
        return super().from_document({**document, "engine": engine})

    def document(self) -> dict[str, Any]:
        content = super().document()
        engine = content.pop("engine")
        content["capture"] |= {
            "revision": self.capture.model_digest,
            "dtype": self.capture.stored_dtype,
            "engine": engine["name"],
            "engine_version": engine["version"],
        }
        return sealed(content)


def withdraw_manifest(capture_folder: Path, shard_ids: Collection[str], reason: str) -> None:
    """Remove a capture folder's manifest if it lists one of these shards, or cannot be read.

    Readers take the shards in a manifest for verified.

    Args:
        reason: the change of the shards, for the log, such as "verification has refused".
    """
    path = Capture(capture_folder).manifest
    if not path.exists():
        return
    try:
        listed = {shard.shard_id for shard in Manifest.read(path).shards} & set(shard_ids)
        why = f"it lists shard {', '.join(sorted(listed))}, which {reason}"
    except UserError as error:
        listed, why = set(shard_ids), f"it cannot be read ({error})"
    if listed:
        path.unlink(missing_ok=True)
        sync(capture_folder)
        print(
            f"{path} was removed: {why}; it is written when all shards are verified",
            file=sys.stderr,
        )
