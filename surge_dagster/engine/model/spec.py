"""EncodingSpec, the settings that shape a vector, and Space, the vector space that follows.

`EncodingSpec.resolve()` reads the model and returns a `Space`, in which every choice is made. The
name of a space is a readable slug and twelve hex digits of the SHA-256 over everything that shapes
a vector, so specs that give the same vectors share a folder and other specs never do. Device,
precision (fp32, fp16, bf16), batch sizes and the library that multiplies matrices are not part of
the name: they move a vector by less than the promised cosine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from surge_dagster.engine.endpoint.endpoint import Endpoint, endpoint_from_json
from surge_dagster.engine.endpoint.probes import (
    LOWEST_PROBE_COSINE,
    PROBE_TEXTS,
    lowest_probe_cosine,
    probe_endpoint,
    written_probes,
)
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.chunk_rule import ChunkRule
from surge_dagster.engine.model.digest import json_sha256
from surge_dagster.engine.model.folder import ModelFacts, describe_model, tokenizer_file
from surge_dagster.engine.model.locating import DEFAULT_MODEL, find_model
from surge_dagster.engine.model.prompts import Prompts, Task
from surge_dagster.engine.support.urls import expanded

HASH_SCHEME = "hash://"
DTYPES = ("float32", "float16")
DerivedDtype = Literal["float32", "float16", "int8", "binary"]
Ranges = tuple[tuple[float, ...], tuple[float, ...]]
DERIVED_DTYPES: tuple[DerivedDtype, ...] = get_args(DerivedDtype)
_FORMAT = 1
_UNIT_TOLERANCE = 0.01  # of the length of a vector
# Of a model behind HTTP, which does not say how much it reads.
_ENDPOINT_MAX_LENGTH = 8_192
_RESOLVED = ("model_digest", "max_length", "normalize", "dimension", "dtype")


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """The requested encoding; None leaves a choice to the model.

    Attributes:
        model: a hub name, a local folder, or `hash://D`, a stand-in that makes unit vectors of
            dimension D from a hash of the text, for tests and for measuring everything around the
            encoder.
        document_prompt: literal text put before each text of the catalog; None is the model's own,
            see `prompts.py`.
        max_length: tokens of a text that the model reads, special tokens included; longer texts are
            cut and counted.
        trust_remote_code: the commit, or for a local folder the digest, of the model's own code
            that may run.
        chunks: if the rows of the space are chunks of documents, how these are cut.
        endpoint: of a model behind HTTP, whose name there is `model`.
    """

    model: str = DEFAULT_MODEL
    document_prompt: str | None = None
    query_prompt: str | None = None
    max_length: int | None = None
    normalize: bool | None = None
    dimension: int | None = None
    dtype: str = "float32"
    trust_remote_code: str | None = None
    chunks: ChunkRule | None = None
    endpoint: Endpoint | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("the model is empty: give a hub name or a folder")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.max_length is not None and self.max_length < 3:
            raise ConfigError(
                "max_length counts tokens, special ones included, and is at least 3, "
                f"not {self.max_length}"
            )
        if self.dimension is not None and self.dimension < 1:
            raise ConfigError(f"dimension is at least 1, not {self.dimension}")
        if self.endpoint is not None:
            self._require_no_local_model()
            self._require_known_length()

    def _require_no_local_model(self) -> None:
        of_local_models = {
            "trust_remote_code": self.trust_remote_code is not None,
            f"the model {self.model!r}": self.model.startswith(HASH_SCHEME),
        }
        given = [name for name, is_given in of_local_models.items() if is_given]
        if given:
            raise ConfigError(
                f"{given[0]} needs a local model, and encoder_url names an encoder behind HTTP. "
                "Leave one of them out."
            )

    def _require_known_length(self) -> None:
        """Refuse chunks of unknown size: a server does not say how many tokens its model reads."""
        if self.chunks is None:
            return
        tokens = self.chunks.tokens or self.max_length
        if tokens is None:
            raise ConfigError(
                "chunks: an encoder behind HTTP does not say how many tokens it reads. Set tokens "
                "of chunks, or max_length."
            )
        if self.max_length is not None and tokens > self.max_length:
            raise ConfigError(
                f"chunks: tokens is {tokens}, and max_length is {self.max_length}. Lower tokens or "
                "raise max_length."
            )
        self.chunks.require_overlap(tokens)

    def as_dict(self) -> dict[str, Any]:
        """The request as space.json records it: without what does not shape a vector."""
        values = asdict(self)
        if self.chunks is None:
            del values["chunks"]
        else:
            values["chunks"] = self.chunks.as_dict()
        if self.endpoint is None:
            del values["endpoint"]
        else:
            values["endpoint"] = self.endpoint.identity
        return values

    def resolve(self) -> Space:
        """Locate the model and compute its digest; of one behind HTTP, encode the probes."""
        if self.endpoint is not None:
            return self._resolve_endpoint(self.endpoint)
        facts = self._facts()
        dimension = self.dimension or facts.dimension
        if dimension > facts.dimension:
            raise ConfigError(
                f"{self.model} has {facts.dimension} dimensions; "
                f"dimension {dimension} is more than that"
            )
        max_length = self.max_length or facts.max_length
        if facts.longest_length is not None and max_length > facts.longest_length:
            raise ConfigError(
                f"{self.model} reads at most {facts.longest_length} tokens; "
                f"max_length {max_length} is more than that"
            )
        if self.chunks is not None:
            self._require_chunks(self.chunks, facts, max_length)
        requested = self
        model_folder = ""
        if expanded(self.model).is_dir():
            requested = replace(self, model=facts.slug)
            model_folder = facts.path
        unnamed = Space(
            name="",
            requested=requested,
            model_folder=model_folder,
            model_path=facts.path,
            model_digest=facts.digest,
            document_prompt=_chosen(self.document_prompt, facts.prompts.document),
            query_prompt=_chosen(self.query_prompt, facts.prompts.query),
            max_length=max_length,
            normalize=_chosen(self.normalize, facts.normalizes),
            dimension=dimension,
            dtype=self.dtype,
        )
        return unnamed.named(facts.slug)

    def _resolve_endpoint(self, endpoint: Endpoint) -> Space:
        endpoint.require_url(self.model)
        prompt = self.document_prompt or ""
        vectors = probe_endpoint(endpoint, self.model, self.dimension, prompt)
        lengths = np.linalg.norm(vectors, axis=1)
        are_units = bool((np.abs(lengths - 1) < _UNIT_TOLERANCE).all())
        unnamed = Space(
            name="",
            requested=self,
            model_path="",
            model_digest=json_sha256({"endpoint": endpoint.identity, "model": self.model}),
            document_prompt=prompt,
            query_prompt=self.query_prompt or "",
            max_length=self.max_length or _ENDPOINT_MAX_LENGTH,
            normalize=_chosen(self.normalize, are_units),
            dimension=vectors.shape[1],
            dtype=self.dtype,
            probes=written_probes(vectors),
        )
        return unnamed.named(re.sub(r"[^A-Za-z0-9._-]+", "-", self.model).strip(".-") or "endpoint")

    def _require_chunks(self, rule: ChunkRule, facts: ModelFacts, max_length: int) -> None:
        if not facts.path or tokenizer_file(Path(facts.path)) is None:
            raise ConfigError(
                f"chunks need a model with a fast tokenizer (tokenizer.json); {self.model} has "
                "none. Use another model, or leave chunks out."
            )
        if rule.tokens is not None and rule.tokens > max_length:
            raise ConfigError(
                f"chunks: tokens is {rule.tokens}, and {self.model} reads {max_length} tokens of a "
                f"text. Use at most {max_length}, or set max_length."
            )
        rule.require_overlap(rule.tokens or max_length)

    def _facts(self) -> ModelFacts:
        if not self.model.startswith(HASH_SCHEME):
            trusted = self.trust_remote_code
            return describe_model(find_model(self.model, trusted), trusted)
        size = self.model.removeprefix(HASH_SCHEME)
        if not size.isdecimal() or not 1 <= int(size) <= 65536:
            raise ConfigError(
                f"{self.model!r}: hash:// is followed by a dimension, as in hash://384"
            )
        if self.dimension not in (None, int(size)) or self.normalize is False:
            raise ConfigError(f"{self.model} makes unit vectors of dimension {size} and no others")
        return ModelFacts(
            path="",
            slug=f"hash-{size}",
            digest=hashlib.sha256(self.model.encode()).hexdigest(),
            prompts=Prompts(),
            max_length=256,
            longest_length=None,
            normalizes=True,
            dimension=int(size),
        )


@dataclass(frozen=True, slots=True)
class Derivation:
    """Where the vectors of a derived space come from; part of the space's identity.

    Attributes:
        parent: name of the space with the float32 vectors, in the same output.
        parent_sha256: that space's `spec_sha256`; its model encodes the queries of a search.
        ranges: of int8 alone: smallest and largest value of each dimension, over all vectors when
            the space was begun. The values are float32 numbers.
    """

    parent: str
    parent_sha256: str
    ranges: Ranges | None = None

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"parent": self.parent, "parent_sha256": self.parent_sha256}
        if self.ranges is not None:
            document["ranges"] = {"min": list(self.ranges[0]), "max": list(self.ranges[1])}
        return document


def derivation_from_json(document: Any) -> Derivation:
    ranges = document.get("ranges")
    if ranges is not None:
        ranges = (tuple(map(float, ranges["min"])), tuple(map(float, ranges["max"])))
    return Derivation(str(document["parent"]), str(document["parent_sha256"]), ranges)


@dataclass(frozen=True, slots=True)
class Space:
    """A vector space: a spec in which every choice is made.

    Attributes:
        requested: the spec as requested, with a model folder reduced to its name.
        model_path: the folder that workers load, "" where there is none (`hash://`, or read from a
            space.json).
        task, model_folder: no part of the space's identity, nor of its name: what a pool with this
            space encodes; the folder of a model that was given as one, at the last run.
        tokenizer: no part of it either: `tokens_digest` of the first run, and the libraries there;
            "" where unknown.
        probes: nor of it: of a model behind HTTP, vectors of texts that identify it (`probes.py`).
        derived: of a derived space, where its vectors come from; `requested` is then that of its
            parent, and `dtype` may be "int8" or "binary" too.
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
    task: Task = "document"
    model_folder: str = ""
    tokenizer: str = field(default="", compare=False)
    probes: tuple[str, ...] = field(default=(), compare=False)
    derived: Derivation | None = None

    @property
    def prompt(self) -> str:
        """The text put before each text that a pool with this space encodes."""
        return self.query_prompt if self.task == "query" else self.document_prompt

    @property
    def side(self) -> Task:
        """`task` where documents and queries are encoded in two ways, else "document"."""
        endpoint = self.requested.endpoint
        has_fields = endpoint is not None and endpoint.fields != endpoint.query_fields
        if has_fields or self.document_prompt != self.query_prompt:
            return self.task
        return "document"

    @property
    def vectors_key(self) -> str:
        """The same for two spaces whose pools give one text the same vector; part of the names of
        caches."""
        if self.side == "document":
            return self.spec_sha256
        return f"{self.spec_sha256} {self.side}"

    @property
    def encoder_sha256(self) -> str:
        """`spec_sha256` of the space whose pool encodes queries for this one: of a derived space,
        its parent."""
        return self.derived.parent_sha256 if self.derived else self.spec_sha256

    @property
    def encoded_name(self) -> str:
        """The name of the space that its texts were encoded into: of a derived space, its
        parent's."""
        return self.derived.parent if self.derived else self.name

    @property
    def loadable(self) -> EncodingSpec:
        """The request that gives this space in any working folder: with its model's folder, where
        it was given so."""
        return self.loadable_from(
            replace(self.requested, model=self.model_folder or self.requested.model)
        )

    def loadable_from(self, request: EncodingSpec) -> EncodingSpec:
        """The request with the prompts of this space, where it leaves them to a model that has
        others today."""
        return replace(
            request, document_prompt=self.document_prompt, query_prompt=self.query_prompt
        )

    def require_tokenizer(self, loaded: str) -> None:
        """Raise `ConfigError` where the loaded tokenizer, as in `tokenizer`, gives texts other
        tokens than this one."""
        if self.tokenizer and loaded and self.tokenizer.split()[0] != loaded.split()[0]:
            raise ConfigError(
                f"the tokenizer of {self.requested.model!r} gives texts other tokens than in the "
                f"first run of {self.name}: expected {self.tokenizer}, not {loaded}. Restore the "
                "model's files or the libraries' versions, or write to another output."
            )

    def require_probes(self, found: Sequence[str]) -> None:
        """Raise `ConfigError` if a model behind HTTP gives other vectors than when the space was
        begun.

        Args:
            found: vectors of the probes, or of the first ones, as `written_probes` gives them.
        """
        if not self.probes or not found:
            return
        cosine = lowest_probe_cosine(self.probes[: len(found)], found)
        if cosine < LOWEST_PROBE_COSINE:
            raise ConfigError(
                f"the endpoint's model has changed: {self.requested.model!r} gives a probe another "
                f"vector than when the space {self.name} was begun (cosine {cosine:.4f}, expected "
                f"{LOWEST_PROBE_COSINE}). Go back to the model's former version, or write to "
                "another output."
            )

    @property
    def carried_probe(self) -> str | None:
        """The last input of each request to a model behind HTTP, whose vector is the first of
        `probes`; None for a local model, and for queries with fields of their own."""
        endpoint = self.requested.endpoint
        if endpoint is None:
            return None
        if self.task == "query" and endpoint.query_fields != endpoint.fields:
            return None
        return self.document_prompt + PROBE_TEXTS[0]

    @property
    def is_http(self) -> bool:
        """Whether its model is behind HTTP."""
        return self.requested.endpoint is not None

    @property
    def has_model(self) -> bool:
        """Whether a pool can start with this space as it is: its model was found, or asked."""
        endpoint = self.requested.endpoint
        if endpoint is not None:
            return bool(endpoint.url and self.probes)
        return bool(self.model_path) or self.is_hash

    @property
    def is_hash(self) -> bool:
        return self.requested.model.startswith(HASH_SCHEME)

    @property
    def title(self) -> str:
        """The space for people, such as "all-MiniLM-L6-v2, 384 float32"; the name alone tells
        spaces apart."""
        model = self.encoded_name.rpartition("-")[0]
        title = f"{model}, {self.dimension} {self.dtype}"
        if self.requested.chunks is not None:
            title += f", chunks of {self.requested.chunks.tokens or self.max_length} tokens"
        return title

    @property
    def spec_sha256(self) -> str:
        """SHA-256 (hex) of the canonical resolved spec; its first 12 digits end the name."""
        return json_sha256({"format": _FORMAT, **self._resolved()})

    def to_json(self) -> dict[str, Any]:
        """The content of `<output>/<space>/space.json`, the same on every machine."""
        return {
            "format": _FORMAT,
            "name": self.name,
            "requested": self.requested.as_dict(),
            **self._resolved(),
            "spec_sha256": self.spec_sha256,
        }

    def _resolved(self) -> dict[str, Any]:
        resolved = {key: getattr(self, key) for key in _RESOLVED}
        resolved["prompt"] = self.document_prompt
        if self.query_prompt:
            resolved["query_prompt"] = self.query_prompt
        if self.derived:
            resolved["derived"] = self.derived.to_json()
        if self.requested.chunks is not None:
            resolved["chunks"] = self.requested.chunks.as_dict()
        return resolved

    def derive(
        self, dtype: DerivedDtype, dimension: int | None = None, ranges: Ranges | None = None
    ) -> Space:
        """A space whose vectors are computed from these; int8 needs `ranges`, and has no name
        without them."""
        size = dimension or self.dimension
        if self.derived or self.dtype != "float32":
            kind = f"holds {self.dtype} vectors"
            if self.derived:
                kind = f"is derived from {self.derived.parent}"
            raise ConfigError(
                f"the space {self.name} {kind}; spaces are derived from one with float32 vectors"
            )
        if dtype not in DERIVED_DTYPES:
            raise ConfigError(
                f"the dtype of a derived space is one of {', '.join(DERIVED_DTYPES)}, not {dtype!r}"
            )
        if not 1 <= size <= self.dimension:
            raise ConfigError(
                f"dimension is 1 to {self.dimension}, those of the space {self.name}; not {size}"
            )
        if dtype == "binary" and size % 8:
            raise ConfigError(
                "binary vectors are stored in bytes: their dimension is a multiple of 8, "
                f"not {size}"
            )
        if dtype == self.dtype and size == self.dimension:
            raise ConfigError(
                f"the space {self.name} has {size} dimensions in float32 already: give another "
                f"dtype ({', '.join(DERIVED_DTYPES[1:])}) or fewer dimensions"
            )
        derivation = Derivation(self.name, self.spec_sha256, ranges)
        unnamed = replace(
            self, name="", dtype=dtype, dimension=size, model_path="", derived=derivation
        )
        if dtype == "int8" and ranges is None:
            return unnamed
        return unnamed.named(f"{self.name.rpartition('-')[0]}-{dtype}-{size}")

    def named(self, slug: str) -> Space:
        """The space with the name that follows from its content and this slug."""
        return replace(self, name=f"{slug}-{self.spec_sha256[:12]}")


def _chosen(requested: Any, of_model: Any) -> Any:
    return of_model if requested is None else requested


def spec_from_json(requested: dict[str, Any]) -> EncodingSpec:
    """The request that `EncodingSpec.as_dict` describes."""
    values = dict(requested)
    if values.get("chunks") is not None:
        values["chunks"] = ChunkRule(**values["chunks"])
    if values.get("endpoint") is not None:
        values["endpoint"] = endpoint_from_json(values["endpoint"])
    return EncodingSpec(**values)


def _recorded(requested: dict[str, Any]) -> dict[str, Any]:
    """Return a request without a server and a key, which an output must not name: texts and keys
    would go there."""
    endpoint = requested.get("endpoint")
    if endpoint is None:
        return requested
    identity = {name: endpoint[name] for name in ("fields", "query_fields")}
    return requested | {"endpoint": identity}


def space_from_json(document: dict[str, Any]) -> Space:
    """The space that a space.json describes, with no path of its model."""
    space_format = document.get("format")
    if space_format != _FORMAT:
        raise ConfigError(
            f"space.json has format {space_format!r}; this version reads format {_FORMAT}: "
            "use the version that wrote it, or another output"
        )
    try:
        space = Space(
            name=document["name"],
            requested=spec_from_json(_recorded(document["requested"])),
            model_path="",
            document_prompt=document["prompt"],
            query_prompt=document.get("query_prompt", ""),
            model_folder=str(document.get("model_folder", "")),
            tokenizer=str(document.get("tokenizer", "")),
            probes=tuple(document.get("probes", ())),
            derived=derivation_from_json(document["derived"]) if "derived" in document else None,
            **{name: document[name] for name in _RESOLVED},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"space.json is incomplete ({error!r}); restore it or use another output"
        ) from error
    if space.spec_sha256 != document.get("spec_sha256") or not space.name.endswith(
        space.spec_sha256[:12]
    ):
        raise ConfigError(
            f"space.json of {space.name} was changed by hand: its checksum differs; restore it"
        )
    return space
