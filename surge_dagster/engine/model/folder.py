"""What a model folder says about its vectors: modules, weights, limits, dimension. No model is
loaded.

Weights come from safetensors only: other formats are pickles, which can run code when they are
loaded. Modules come from sentence-transformers only, unless the model's code is trusted: other
types would be imported from its folder.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import (
    UntrustedCode,
    is_snapshot,
    model_digest,
    own_files,
    read_document,
    trusted_code,
    untrusted,
)
from surge_dagster.engine.model.prompts import CONFIG_FILE, Prompts, read_prompts

log = logging.getLogger(__name__)

DEMO_MODEL_DIGEST = "4182c0a5c03ea7e9a9d87a1c37b57b44387c2f9637fdcda9e475789cde9d324f"
DEMO_SLUG = "all-MiniLM-L6-v2"

# Models whose positions begin behind that of the padding token: they have one for fewer tokens.
_POSITIONS_BEHIND_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "lilt",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
_NO_LIMIT = 10**9
_DEFAULT_LENGTH = 512
_WEIGHTLESS = frozenset({"Pooling", "Normalize", "Dropout"})
_KNOWN_KINDS = _WEIGHTLESS | {
    "Transformer",
    "Dense",
    "LayerNorm",
    "StaticEmbedding",
    "WeightedLayerPooling",
}
_ROUTERS = ("Router", "Asym")
_LIBRARY = "sentence_transformers."
# The packages that versions of the library keep the same modules in, then the module's own file in
# some versions.
_USUAL_TYPE = re.compile(
    r"sentence_transformers\.(?:models|base\.modules|sentence_transformer\.modules)(?:\.\w+)?\.(\w+)"
)


# in front of the name of each mode, in the older form of the config
_POOLING_FLAG = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class ModelModule:
    """One module of a sentence-transformers model.

    Attributes:
        kind: the last part of the module's type, which stays the same when the library moves its
            modules; the whole type where the module is not in a package of the library's usual
            ones.
        config: of a module that is no Transformer.
        weights: files of safetensors.
    """

    kind: str
    folder: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]

    @property
    def files(self) -> set[Path]:
        """The files that shape a vector; of a kind that is not known, all that may."""
        if self.kind in _KNOWN_KINDS:
            return own_files(self.folder)
        return _all_files(self.folder)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says: enough to name a vector space without loading the model.

    Attributes:
        longest_length: tokens that the model can read at most; None where its config states no
            limit.
    """

    path: str
    slug: str
    digest: str
    prompts: Prompts
    max_length: int
    longest_length: int | None
    normalizes: bool
    dimension: int


def describe_model(folder: Path, trusted: str | None = None) -> ModelFacts:
    """Read a model folder's configs, and compute the digest of its files."""
    code = trusted_code(folder, trusted)
    modules = _read_modules(folder, with_code=code is not None)
    for module in modules:
        if module.kind in _ROUTERS:
            raise ConfigError(
                f"{folder} has a {module.kind}, which sends queries through modules of their own; "
                "use another model"
            )
    own = read_document(folder / CONFIG_FILE) or {}
    files = own_files(folder).union(*(module.files for module in modules))
    digest = model_digest(files, folder, code)
    root = modules[0].folder
    config = read_document(root / "config.json") or {}
    longest = _longest_length(config)
    return ModelFacts(
        path=str(folder),
        slug=DEMO_SLUG if digest == DEMO_MODEL_DIGEST else _slug(folder),
        digest=digest,
        prompts=read_prompts(own, folder),
        max_length=_max_length(root, longest),
        longest_length=longest,
        normalizes=any(module.kind == "Normalize" for module in modules),
        dimension=_dimension(folder, modules, config, own),
    )


def tokenizer_file(folder: Path) -> Path | None:
    """Return the fast tokenizer of a model that was described before; None if it has none."""
    root = _read_modules(folder, with_code=True)[0]
    file = root.folder / "tokenizer.json"
    return file if root.kind == "Transformer" and file.is_file() else None


def has_all_weights(folder: Path) -> bool:
    """Whether every module has its weights, which an interrupted download may lack."""
    try:
        with_weights = _KNOWN_KINDS - _WEIGHTLESS
        modules = [each for each in _read_modules(folder) if each.kind in with_weights]
        return all(module.weights for module in modules)
    except UntrustedCode:
        # another download would not help: `describe_model` refuses the model with its reason
        return True
    except ConfigError:
        return False


def _read_modules(folder: Path, with_code: bool = False) -> list[ModelModule]:
    listing = folder / "modules.json"
    if not listing.is_file():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} is not a model: it has neither modules.json nor config.json; "
                "check the path"
            )
        # sentence-transformers adds mean pooling to a bare transformer.
        pooling = ModelModule("Pooling", folder, {}, ())
        return [_module("Transformer", folder), pooling]

    try:
        entries = json.loads(listing.read_bytes())
        links = [(str(entry["type"]), folder / str(entry["path"])) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{listing} cannot be read ({error!r}); download the model again"
        ) from error
    for module_type, _ in links:
        if not with_code and not module_type.startswith(_LIBRARY):
            raise untrusted(
                folder,
                f"lists a module of type {module_type!r} in modules.json, which is code of its own",
            )
    return [_module(_kind(module_type), place) for module_type, place in links]


def _kind(module_type: str) -> str:
    usual = _USUAL_TYPE.fullmatch(module_type)
    return usual[1] if usual else module_type


def _module(kind: str, folder: Path) -> ModelModule:
    config: dict[str, Any] = {}
    if kind != "Transformer":
        config = read_document(folder / "config.json") or {}
    weights = () if kind in _WEIGHTLESS else _weights_of(kind, folder)
    for file in weights:
        _require_safetensors(file)
    return ModelModule(kind, folder, config, weights)


def _all_files(folder: Path) -> set[Path]:
    files = set[Path]()
    for path in folder.rglob("*"):
        is_exported = {"onnx", "openvino"} & set(path.relative_to(folder).parts)
        if path.suffix in (".json", ".txt", ".model", ".safetensors") and not is_exported:
            files.add(path)
    return files


def _require_safetensors(file: Path) -> None:
    try:
        safe_open(file, framework="numpy").keys()
    except SafetensorError as error:
        raise ConfigError(
            f"{file} is not a safetensors file ({error}); download the model again"
        ) from error


def _weights_of(kind: str, folder: Path) -> tuple[Path, ...]:
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    if index := read_document(folder / "model.safetensors.index.json"):
        shards = sorted(set((index.get("weight_map") or {}).values()))
        files = tuple(folder / shard for shard in shards)
        if missing := [str(file) for file in files if not file.is_file()]:
            raise ConfigError(f"the model lacks {', '.join(missing)}; download it again")
        return files
    if kind == "Transformer" or any(folder.glob("*.bin")):
        raise ConfigError(
            f"{folder} has no model.safetensors, and other weight formats can run code when they "
            "are loaded: use a model with safetensors, or convert it on a machine that you trust "
            "it on (SentenceTransformer(name).save_pretrained(folder))"
        )
    return ()


def _longest_length(config: dict[str, Any]) -> int | None:
    """Return the tokens that a model has positions for; None where its config states no limit."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        return None
    is_absolute = config.get("position_embedding_type", "absolute") == "absolute"
    if config.get("model_type") in _POSITIONS_BEHIND_PADDING and is_absolute:
        padding = config.get("pad_token_id")
        return positions - 1 - (1 if padding is None else padding)
    return positions


def _max_length(folder: Path, longest: int | None) -> int:
    """Return the tokens that a model reads: what its files state, if it has positions for them."""
    stated, file = _stated_length(folder)
    if longest is None or stated <= longest:
        return stated
    if file is not None:
        _warn_once(
            f"{file} states {stated} tokens, and the model has positions for {longest}: "
            f"it reads {longest} of each text"
        )
    return longest


def _stated_length(folder: Path) -> tuple[int, Path | None]:
    """Return a model's own limit and its file, from the same places as in sentence-transformers."""
    for file in sorted(folder.glob("sentence_*_config.json")):
        stated = (read_document(file) or {}).get("max_seq_length")
        if isinstance(stated, int):
            return stated, file
    found = list[tuple[int, Path]]()
    for name, key in (
        ("tokenizer_config.json", "model_max_length"),
        ("config.json", "max_position_embeddings"),
    ):
        stated = (read_document(folder / name) or {}).get(key)
        # Tokenizers without a limit state 10^30.
        if isinstance(stated, int | float) and 0 < stated < _NO_LIMIT:
            found.append((int(stated), folder / name))
    return min(found, default=(_DEFAULT_LENGTH, None))


@lru_cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _dimension(
    folder: Path, modules: list[ModelModule], config: dict[str, Any], own: dict[str, Any]
) -> int:
    dimension: Any = config.get("hidden_size") or config.get("dim") or config.get("d_model")
    for module in modules:
        if module.kind == "Pooling":
            dimension = _pooled_dimension(module.config, dimension)
        elif module.kind == "Dense":
            dimension = module.config.get("out_features", dimension)
        elif module.kind == "StaticEmbedding":
            dimension = _table_dimension(module.weights[0])
    if not isinstance(dimension, int) or dimension < 1:
        raise ConfigError(
            f"{folder} does not say how many dimensions its vectors have; use another model"
        )
    truncated = own.get("truncate_dim")
    if isinstance(truncated, int) and truncated > 0:
        return min(dimension, truncated)
    return dimension


def _pooled_dimension(config: dict[str, Any], dimension: Any) -> Any:
    """Return the dimension behind a Pooling module, whose modes are concatenated."""
    own = config.get("embedding_dimension", config.get("word_embedding_dimension", dimension))
    if not isinstance(own, int):
        return None
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [name for name in config if name.startswith(_POOLING_FLAG) and config[name]]
    if isinstance(modes, str):
        modes = [modes]
    return own * max(1, len(modes))


def _table_dimension(weights: Path) -> int:
    """Return the dimension of a StaticEmbedding, whose table is the first tensor of its file."""
    with safe_open(weights, framework="numpy") as tensors:
        first = next(iter(tensors.keys()))
        return tensors.get_slice(first).get_shape()[1]


def _slug(folder: Path) -> str:
    name = folder.name
    if is_snapshot(folder):
        name = folder.parent.parent.name.rpartition("--")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "model"
