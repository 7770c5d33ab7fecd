"""EncodingSpec, the settings that shape a vector, and Space, the vector space that follows from them.

`EncodingSpec.resolve()` reads the model and returns a `Space`, in which every choice is made. The name of a space is a
readable slug and twelve hex digits of the SHA-256 over everything that shapes a vector, so specs that give the same
vectors share a folder and other specs never do. Device, precision (fp32, fp16, bf16), batch sizes and the library that
multiplies matrices are not part of the name: they move a vector by less than the promised cosine.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.derivation import DERIVED_DTYPES, Derivation, DerivedDtype, Ranges, derivation_from_json
from surge_dagster.engine.model.digest import canonical_json
from surge_dagster.engine.model.folder import describe_model
from surge_dagster.engine.model.locating import DEFAULT_MODEL, find_model
from surge_dagster.engine.model.prompts import Task

HASH_SCHEME = "hash://"
SPACE_FORMAT = 1
DTYPES = ("float32", "float16")
FileFormat = Literal["parquet", "arrow"]
FILE_FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
# Versions that know only Parquet refuse this format; otherwise they would write Parquet files into an Arrow space.
_ARROW_SPACE_FORMAT = 2
# Versions that do not know a prompt for queries refuse this one; otherwise they would find another checksum.
_QUERY_PROMPT_SPACE_FORMAT = 3
# Versions that do not know derived spaces refuse this one; otherwise they would take it for a space to embed into.
_DERIVED_SPACE_FORMAT = 4
_SPACE_FORMATS = (SPACE_FORMAT, _ARROW_SPACE_FORMAT, _QUERY_PROMPT_SPACE_FORMAT, _DERIVED_SPACE_FORMAT)
_RESOLVED = ("model_digest", "max_length", "normalize", "dimension", "dtype")
_HASH_MAX_LENGTH = 256


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """The requested encoding; None leaves a choice to the model.

    Attributes:
        model: a hub name, a local folder, or `hash://D`: a stand-in without a model that derives unit vectors of
            dimension D from a hash of the text, for tests and for measuring everything around the encoder.
        document_prompt: literal text put before each text of the catalog; None is the model's own, see `prompts.py`.
        query_prompt: literal text put before each query of a search; None is the model's own.
        max_length: tokens of a text that the model reads, special tokens included; longer texts are cut and counted.
        normalize: whether vectors have length 1; None follows the model's modules.
        dimension: number of leading dimensions to keep; None keeps all.
        dtype: type of the stored vectors, "float32" or "float16".
        trust_remote_code: the commit, or for a local folder the digest, of the model's own code that may run; None is
            for no code.

    Raises:
        ConfigError: a value that no model can serve.
    """

    model: str = DEFAULT_MODEL
    document_prompt: str | None = None
    query_prompt: str | None = None
    max_length: int | None = None
    normalize: bool | None = None
    dimension: int | None = None
    dtype: str = "float32"
    trust_remote_code: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("the model is empty: give a hub name, a folder or hash://D")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.max_length is not None and self.max_length < 3:
            raise ConfigError(
                f"max_length counts tokens, special ones included, and is at least 3, not {self.max_length}"
            )
        if self.dimension is not None and self.dimension < 1:
            raise ConfigError(f"dimension is at least 1, not {self.dimension}")

    def as_dict(self) -> dict[str, Any]:
        """The fields as space.json stores them: `prompt` is the documents'; later ones are there where they are set."""
        fields = asdict(self)
        document_prompt = fields.pop("document_prompt")
        optional = {name: fields.pop(name) for name in ("query_prompt", "trust_remote_code")}
        given = {name: value for name, value in optional.items() if value is not None}
        return fields | {"prompt": document_prompt} | given

    def resolve(self) -> Space:
        """Locates the model and computes its digest.

        Raises:
            ConfigError: the model is not available or does not fit the spec; the message says what to do.
        """
        if self.model.startswith(HASH_SCHEME):
            return self._resolve_hash()
        facts = describe_model(find_model(self.model, self.trust_remote_code), self.trust_remote_code)
        dimension = self.dimension or facts.dimension
        if dimension > facts.dimension:
            raise ConfigError(f"{self.model} has {facts.dimension} dimensions; dimension {dimension} is more than that")
        max_length = self.max_length or facts.max_length
        if facts.longest_length is not None and max_length > facts.longest_length:
            raise ConfigError(
                f"{self.model} reads at most {facts.longest_length} tokens; max_length {max_length} is more than that"
            )
        requested = replace(self, model=facts.slug) if Path(self.model).expanduser().is_dir() else self
        return _named(
            facts.slug,
            requested=requested,
            model_folder="" if requested is self else facts.path,
            model_path=facts.path,
            model_digest=facts.digest,
            document_prompt=facts.prompts.document if self.document_prompt is None else self.document_prompt,
            query_prompt=facts.prompts.query if self.query_prompt is None else self.query_prompt,
            max_length=max_length,
            normalize=facts.normalizes if self.normalize is None else self.normalize,
            dimension=dimension,
            dtype=self.dtype,
            routed=facts.routed,
        )

    def _resolve_hash(self) -> Space:
        size = self.model.removeprefix(HASH_SCHEME)
        if not size.isdecimal() or not 1 <= int(size) <= 65536:
            raise ConfigError(f"{self.model!r}: hash:// is followed by a dimension, as in hash://384")
        if self.dimension not in (None, int(size)) or self.normalize is False:
            raise ConfigError(f"{self.model} makes unit vectors of dimension {size} and no others")
        return _named(
            f"hash-{size}",
            requested=self,
            model_path="",
            model_digest=hashlib.sha256(self.model.encode()).hexdigest(),
            document_prompt=self.document_prompt or "",
            query_prompt=self.query_prompt or "",
            max_length=self.max_length or _HASH_MAX_LENGTH,
            normalize=True,
            dimension=int(size),
            dtype=self.dtype,
        )


@dataclass(frozen=True, slots=True)
class Space:
    """A vector space: a spec in which every choice is made.

    Attributes:
        name: slug and 12 hex digits; the name of the output's folder.
        requested: the spec as requested, with a model folder reduced to its name.
        model_path: the folder that workers load, "" where there is none (`hash://`, or read from a space.json).
        model_digest: SHA-256 over everything in the model that shapes a vector.
        document_prompt, query_prompt: text put before each document and before each query, "" for none.
        file_format: format of all files of the space, read from its space.json. It shapes no vector and is not part
            of the name.
        routed: whether the model may have other modules for queries than for documents.
        task: what a pool with this space encodes. Neither is part of the space itself.
        model_folder: the folder of a model that was given as one, at the last run; "" for other models. It is not part
            of the name either.
        derived: of a derived space, where its vectors come from; `requested` is then that of its parent, and `dtype`
            may be "int8" or "binary" too.
    """

    name: str
    requested: EncodingSpec
    model_path: str
    model_digest: str
    document_prompt: str
    query_prompt: str
    max_length: int
    normalize: bool
    dimension: int
    dtype: str
    file_format: FileFormat = "parquet"
    routed: bool = False
    task: Task = "document"
    model_folder: str = ""
    derived: Derivation | None = None

    @property
    def prompt(self) -> str:
        """The text put before each text that a pool with this space encodes."""
        return self.query_prompt if self.task == "query" else self.document_prompt

    @property
    def side(self) -> Task:
        """`task` where documents and queries are encoded in two ways, else "document"."""
        return self.task if self.routed or self.document_prompt != self.query_prompt else "document"

    @property
    def vectors_key(self) -> str:
        """The same for two spaces whose pools give one text the same vector; part of the names of caches."""
        return self.spec_sha256 if self.side == "document" else f"{self.spec_sha256} {self.side}"

    @property
    def encoder_sha256(self) -> str:
        """`spec_sha256` of the space whose pool encodes queries for this one: of a derived space, its parent."""
        return self.derived.parent_sha256 if self.derived else self.spec_sha256

    @property
    def loadable(self) -> EncodingSpec:
        """The request that gives this space in any working folder: with its model's folder, where it was given so."""
        return self.loadable_from(replace(self.requested, model=self.model_folder or self.requested.model))

    def loadable_from(self, request: EncodingSpec) -> EncodingSpec:
        """The request with the prompts of this space, where it leaves them to a model that has others today."""
        return replace(request, document_prompt=self.document_prompt, query_prompt=self.query_prompt)

    @property
    def is_hash(self) -> bool:
        """Whether vectors come from a hash instead of a model."""
        return self.requested.model.startswith(HASH_SCHEME)

    @property
    def title(self) -> str:
        """The space for people, such as "all-MiniLM-L6-v2, 384 float32"; the name alone tells spaces apart."""
        model = self.derived.parent if self.derived else self.name
        return f"{model.rpartition('-')[0]}, {self.dimension} {self.dtype}"

    @property
    def spec_sha256(self) -> str:
        """SHA-256 (hex) of the canonical resolved spec; its first 12 digits end the name."""
        return hashlib.sha256(canonical_json({"format": SPACE_FORMAT, **self._resolved()})).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The content of `<output>/<space>/space.json`, the same on every machine."""
        return {
            "format": self._format,
            "name": self.name,
            "requested": self.requested.as_dict(),
            "file_format": self.file_format,
            **self._resolved(),
            "spec_sha256": self.spec_sha256,
        }

    @property
    def _format(self) -> int:
        if self.derived:
            return _DERIVED_SPACE_FORMAT
        if self.query_prompt:
            return _QUERY_PROMPT_SPACE_FORMAT
        return SPACE_FORMAT if self.file_format == "parquet" else _ARROW_SPACE_FORMAT

    def _resolved(self) -> dict[str, Any]:
        # Format 1 calls the documents' prompt `prompt`. Without a prompt for queries a space is what it always was.
        prompts = {"prompt": self.document_prompt} | ({"query_prompt": self.query_prompt} if self.query_prompt else {})
        derived = {"derived": self.derived.to_json()} if self.derived else {}
        return {key: getattr(self, key) for key in _RESOLVED} | prompts | derived

    def derive(self, dtype: DerivedDtype, dimension: int | None = None, ranges: Ranges | None = None) -> Space:
        """A space whose vectors are computed from those of this one.

        Args:
            dtype: type of its vectors.
            dimension: leading dimensions that are kept; None is all.
            ranges: of int8; see `Derivation`. Without them the space has no name yet.

        Raises:
            ConfigError: such a space cannot be computed from this one.
        """
        size = dimension or self.dimension
        if self.derived or self.dtype != "float32":
            kind = f"is derived from {self.derived.parent}" if self.derived else f"holds {self.dtype} vectors"
            raise ConfigError(f"the space {self.name} {kind}; spaces are derived from one with float32 vectors alone")
        if dtype not in DERIVED_DTYPES:
            raise ConfigError(f"the dtype of a derived space is one of {', '.join(DERIVED_DTYPES)}, not {dtype!r}")
        if not 1 <= size <= self.dimension:
            raise ConfigError(f"dimension is 1 to {self.dimension}, those of the space {self.name}; not {size}")
        if dtype == "binary" and size % 8:
            raise ConfigError(f"binary vectors are stored in bytes: their dimension is a multiple of 8, not {size}")
        if dtype == self.dtype and size == self.dimension:
            raise ConfigError(
                f"the space {self.name} has {size} dimensions in float32 already: give another dtype "
                f"({', '.join(DERIVED_DTYPES[1:])}) or fewer dimensions"
            )
        derivation = Derivation(self.name, self.spec_sha256, ranges)
        unnamed = replace(self, name="", dtype=dtype, dimension=size, model_path="", derived=derivation)
        if dtype == "int8" and ranges is None:
            return unnamed
        slug = f"{self.name.rpartition('-')[0]}-{dtype}-{size}"
        return replace(unnamed, name=f"{slug}-{unnamed.spec_sha256[:12]}")


def space_from_json(document: dict[str, Any]) -> Space:
    """The space that a space.json describes, with no model folder.

    Raises:
        ConfigError: the document is incomplete, was changed by hand, or needs another version.
    """
    if document.get("format") not in _SPACE_FORMATS:
        raise ConfigError(
            f"space.json has format {document.get('format')!r}; this version reads "
            f"{', '.join(map(str, _SPACE_FORMATS))}: use the version that wrote it, or another output"
        )
    try:
        known = {field.name for field in fields(EncodingSpec)}
        requested = {key: value for key, value in document["requested"].items() if key in known}
        requested["document_prompt"] = document["requested"].get("prompt")
        resolved = {key: document[key] for key in _RESOLVED}
        resolved |= {"document_prompt": document["prompt"], "query_prompt": document.get("query_prompt", "")}
        resolved["file_format"] = document.get("file_format", "parquet")  # older documents do not name it
        resolved["model_folder"] = str(document.get("model_folder", ""))
        resolved["derived"] = derivation_from_json(document["derived"]) if "derived" in document else None
        space = Space(name=document["name"], requested=EncodingSpec(**requested), model_path="", **resolved)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"space.json is incomplete ({error!r}); restore it or use another output") from error
    if space.file_format not in FILE_FORMATS:
        raise ConfigError(
            f"space.json of {space.name} names the file format {space.file_format!r}; this version knows "
            f"{', '.join(FILE_FORMATS)}: use the version that wrote it, or another output"
        )
    if document["format"] != space.to_json()["format"]:
        raise ConfigError(
            f"space.json of {space.name} was changed by hand: with its {space.file_format} files and prompts it has "
            f"format {space.to_json()['format']}, not format {document['format']}; restore it or use another output"
        )
    if space.spec_sha256 != document.get("spec_sha256") or not space.name.endswith(space.spec_sha256[:12]):
        raise ConfigError(f"space.json of {space.name} was changed by hand: its checksum differs; restore it")
    return space


def _named(slug: str, **resolved: Any) -> Space:
    unnamed = Space(name="", **resolved)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", slug)
    return replace(unnamed, name=f"{slug}-{unnamed.spec_sha256[:12]}")
