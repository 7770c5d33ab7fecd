"""What shapes a vector, and the name that follows from it.

An `EncodingSpec` is what a person asks for; `resolve()` looks at the model and turns it into a `Space`, where nothing
is left open. The space's name is a slug for people and twelve hex digits of the SHA-256 over all that shapes a vector,
so two specs that give the same vectors share a folder, and two that do not never do. Device, floating-point precision,
batch sizes and the library that multiplies matrices are not part of it: they move a vector by less than the promised
cosine. int8 arithmetic moves it much further, so that its vectors are a space of their own.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import canonical_json
from surge_dagster.engine.model.model_files import DEFAULT_MODEL, describe_model, find_model

HASH_SCHEME = "hash://"
SPACE_FORMAT = 1
DTYPES = ("float32", "float16")
ARITHMETICS = ("float", "int8")
FileFormat = Literal["parquet", "arrow"]
FILE_FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
# Moves when the way a model is quantized changes (see `backends/quantized_models.py`), because the vectors then do.
INT8_RECIPE = 1
_HASH_MAX_LENGTH = 256


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """What is asked for; None leaves a choice to the model.

    Attributes:
        model: a hub name, a local folder, or `hash://D`: a stand-in without a model that derives unit vectors of
            dimension D from a hash of the text, for tests and for measuring everything around the encoder.
        prompt: literal text put before each text; None is the model's default prompt, if it has one.
        max_length: tokens of a text that count, special tokens included; what is longer is cut and counted.
        normalize: whether vectors have length 1; None is as the model's modules say.
        dimension: leading dimensions to keep; None is all of them.
        dtype: type of the stored vectors, "float32" or "float16".
        arithmetic: "float" for fp32, fp16 and bf16, which share their spaces, or "int8".
    """

    model: str = DEFAULT_MODEL
    prompt: str | None = None
    max_length: int | None = None
    normalize: bool | None = None
    dimension: int | None = None
    dtype: str = "float32"
    arithmetic: str = "float"

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("the model is empty: give a hub name, a folder or hash://D")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.arithmetic not in ARITHMETICS:
            raise ConfigError(f"arithmetic is one of {', '.join(ARITHMETICS)}, not {self.arithmetic!r}")
        if self.max_length is not None and self.max_length < 3:
            raise ConfigError(
                f"max_length counts tokens, special ones included, and is at least 3, not {self.max_length}"
            )
        if self.dimension is not None and self.dimension < 1:
            raise ConfigError(f"dimension is at least 1, not {self.dimension}")

    def as_dict(self) -> dict[str, Any]:
        """Its fields as they stand in a space.json; "float" is left out, as if there were nothing else to choose."""
        return _without_float(asdict(self))

    def resolve(self) -> Space:
        """Finds the model and digests it; `ConfigError` says what to do when it cannot be had."""
        if self.model.startswith(HASH_SCHEME):
            return self._resolve_hash()
        facts = describe_model(find_model(self.model))
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
            model_path=facts.path,
            model_digest=facts.digest,
            prompt=facts.default_prompt if self.prompt is None else self.prompt,
            max_length=max_length,
            normalize=facts.normalizes if self.normalize is None else self.normalize,
            dimension=dimension,
            dtype=self.dtype,
            # The recipe shapes the vectors as much as the arithmetic does.
            arithmetic=f"int8-{INT8_RECIPE}" if self.arithmetic == "int8" else self.arithmetic,
        )

    def _resolve_hash(self) -> Space:
        size = self.model.removeprefix(HASH_SCHEME)
        if not size.isdecimal() or not 1 <= int(size) <= 65536:
            raise ConfigError(f"{self.model!r}: hash:// is followed by a dimension, as in hash://384")
        if self.dimension not in (None, int(size)) or self.normalize is False:
            raise ConfigError(f"{self.model} makes unit vectors of dimension {size} and no others")
        if self.arithmetic != "float":
            raise ConfigError(f"{self.model} has no model that could compute in {self.arithmetic}; use precision auto")
        return _named(
            f"hash-{size}",
            requested=self,
            model_path="",
            model_digest=hashlib.sha256(self.model.encode()).hexdigest(),
            prompt=self.prompt or "",
            max_length=self.max_length or _HASH_MAX_LENGTH,
            normalize=True,
            dimension=int(size),
            dtype=self.dtype,
        )


@dataclass(frozen=True, slots=True)
class Space:
    """A vector space: a spec with nothing left open.

    Attributes:
        name: slug and 12 hex digits; the name of the output's folder.
        requested: the spec as asked for, a folder reduced to its name.
        model_path: the folder that workers load, "" where there is none (`hash://`, or read from a space.json).
        model_digest: SHA-256 over everything in the model that shapes a vector.
        arithmetic: "float", or "int8-N" for vectors of a model that was quantized by recipe N.
        file_format: of all its files, in the output whose space.json it was read from. It shapes no vector, and is no
            part of the name.
    """

    name: str
    requested: EncodingSpec
    model_path: str
    model_digest: str
    prompt: str
    max_length: int
    normalize: bool
    dimension: int
    dtype: str
    arithmetic: str = "float"
    file_format: FileFormat = "parquet"

    @property
    def is_hash(self) -> bool:
        """Whether vectors come from a hash instead of a model."""
        return self.requested.model.startswith(HASH_SCHEME)

    @property
    def is_int8(self) -> bool:
        """Whether vectors come from a quantized model."""
        return self.requested.arithmetic == "int8"

    def in_float(self) -> Space:
        """The space of the same model and settings in floating-point arithmetic."""
        plain = replace(self, requested=replace(self.requested, arithmetic="float"), arithmetic="float")
        return replace(plain, name=f"{self.name.rpartition('-')[0]}-{plain.spec_sha256[:12]}")

    @property
    def spec_sha256(self) -> str:
        """SHA-256 (hex) of the canonical resolved spec; its first 12 digits end the name."""
        return hashlib.sha256(canonical_json({"format": SPACE_FORMAT, **self._resolved()})).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """What `<output>/<space>/space.json` holds: the same on every machine."""
        return {
            "format": SPACE_FORMAT if self.file_format == "parquet" else _ARROW_SPACE_FORMAT,
            "name": self.name,
            "requested": self.requested.as_dict(),
            "file_format": self.file_format,
            **self._resolved(),
            "spec_sha256": self.spec_sha256,
        }

    def _resolved(self) -> dict[str, Any]:
        return _without_float({key: getattr(self, key) for key in _RESOLVED})


# So that versions which know only Parquet refuse the space, and do not fill it with files that others take for strays.
_ARROW_SPACE_FORMAT = 2
_RESOLVED = ("model_digest", "prompt", "max_length", "normalize", "dimension", "dtype", "arithmetic")


def arithmetic_of(precision: str) -> str:
    """The arithmetic of an `EncodingSpec` that is to be computed in a precision, "auto" included."""
    return "int8" if precision == "int8" else "float"


def space_from_json(document: dict[str, Any]) -> Space:
    """The space that a space.json describes, without a folder to load; `ConfigError` when it does not hold together."""
    if document.get("format") not in (SPACE_FORMAT, _ARROW_SPACE_FORMAT):
        raise ConfigError(
            f"space.json has format {document.get('format')!r}; this version reads {SPACE_FORMAT} and "
            f"{_ARROW_SPACE_FORMAT}: use the version that wrote it, or another output"
        )
    try:
        known = {field.name for field in fields(EncodingSpec)}
        asked = {key: value for key, value in document["requested"].items() if key in known}
        resolved = {key: document[key] for key in _RESOLVED if key != "arithmetic"}
        resolved["arithmetic"] = document.get("arithmetic", "float")
        resolved["file_format"] = document.get("file_format", "parquet")  # older ones do not say it
        space = Space(name=document["name"], requested=EncodingSpec(**asked), model_path="", **resolved)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"space.json is incomplete ({error!r}); restore it or use another output") from error
    if space.file_format not in FILE_FORMATS:
        raise ConfigError(
            f"space.json of {space.name} names the file format {space.file_format!r}; this version knows "
            f"{', '.join(FILE_FORMATS)}: use the version that wrote it, or another output"
        )
    if document["format"] != space.to_json()["format"]:
        raise ConfigError(
            f"space.json of {space.name} was changed by hand: a space of {space.file_format} files has format "
            f"{space.to_json()['format']}, not format {document['format']}; restore it or use another output"
        )
    if space.requested.arithmetic != space.arithmetic.partition("-")[0]:
        raise ConfigError(
            f"space.json of {space.name} was changed by hand: its vectors are {space.arithmetic}, and "
            f"{space.requested.arithmetic} was asked for; restore it"
        )
    if space.spec_sha256 != document.get("spec_sha256") or not space.name.endswith(space.spec_sha256[:12]):
        raise ConfigError(f"space.json of {space.name} was changed by hand: its checksum differs; restore it")
    return space


def _without_float(document: dict[str, Any]) -> dict[str, Any]:
    # Spaces were named before there was a choice of arithmetic, and keep their names.
    return {key: value for key, value in document.items() if (key, value) != ("arithmetic", "float")}


def _named(slug: str, **resolved: Any) -> Space:
    unnamed = Space(name="", **resolved)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", slug)
    return replace(unnamed, name=f"{slug}-{unnamed.spec_sha256[:12]}")
