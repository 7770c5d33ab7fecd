"""The digest of a model: one SHA-256, the same for every folder that computes the same vectors.

The digest covers the tensors (by name, type, shape and bytes, so that a file that was split into shards or saved with
other metadata keeps its digest), the tokenizer, the settings that shape vectors, and the chain of modules. It leaves
out everything else: where the folder came from, which library version wrote it, dropout, labels, the truncation and
padding in a tokenizer file, and default values that one version of a library writes and another leaves out. So a hub
snapshot, a pip package and a re-saved folder share one vector space.

Reading 90 MB takes a third of a second and reading 10 GB half a minute, so the digests of a file's tensors are kept
on disk by path, size, modification time, inode and change time. A program can set the modification time back after
it replaced the content, but not the change time.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support import disk_cache

_MAX_HEADER_BYTES = 100 << 20

# Settings of config.json that never change a vector at inference.
# fmt: off
_IGNORED_SETTINGS = frozenset((
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache",
    "gradient_checkpointing", "initializer_range", "initializer_factor", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout",
    "attention_dropout", "activation_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "dropout",
    "mlp_dropout", "embedding_dropout", "layerdrop", "seq_classif_dropout", "qa_dropout", "summary_first_dropout",
    "summary_last_dropout", "classifier_bias", "classifier_pooling", "output_attentions", "output_hidden_states",
    "return_dict", "tie_word_embeddings", "tie_weights_", "_attn_implementation", "attn_implementation", "auto_map",
    "torchscript", "use_bfloat16", "chunk_size_feed_forward", "bos_token_id", "eos_token_id", "sep_token_id",
    "cls_token_id", "mask_token_id", "decoder_start_token_id", "language", "model_max_length",
))
# fmt: on
# Default values: some library versions write them, others leave the key out.
_DEFAULT_SETTINGS: dict[str, Any] = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "layer_norm_eps": 1e-12,
}
_MODULE_DEFAULTS: dict[str, dict[str, Any]] = {  # of text models
    "Transformer": {
        "do_lower_case": False,
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    },
    "Pooling": {"include_prompt": True},
    "Normalize": {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"},
}
# The few settings beside tokenizer.json that a tokenizer is rebuilt with.
_TOKENIZER_SETTINGS = (
    *("do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    *("add_prefix_space", "truncation_side", "padding_side"),
)
# Classes that use tokenizer.json as it is; others rebuild it, which changes nothing with special tokens like these.
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizer")
_USUAL_TOKENS = {
    "unk_token": ("[UNK]", "<unk>"),
    **dict.fromkeys(("cls_token", "bos_token"), ("[CLS]", "<s>", "<bos>")),
    **dict.fromkeys(("sep_token", "eos_token"), ("[SEP]", "</s>", "<eos>", "<|im_end|>", "<|endoftext|>")),
}
# Model inputs that a tokenizer states or leaves out without an effect on a vector; BERT's and RoBERTa's defaults.
_USUAL_INPUTS = (
    ["input_ids", "attention_mask"],
    ["input_ids", "attention_mask", "token_type_ids"],
    ["input_ids", "token_type_ids", "attention_mask"],
)

# Files that define a tokenizer where there is no tokenizer.json.
_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")

_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class ModelModule:
    """One module of a sentence-transformers model.

    Attributes:
        kind: the last part of the module's type, which stays the same when the library moves its modules; the whole
            type where the module is not in a package of the library's usual ones.
        others: files of an unknown kind of module, which are digested byte by byte.
    """

    kind: str
    folder: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    others: tuple[Path, ...] = ()


def model_digest(modules: list[ModelModule], code: str | None = None) -> str:
    """The SHA-256 (hex) of all that shapes a vector, and of `code` where it is run; the first module has the config."""
    root = modules[0].folder
    document = {
        "format": 1,
        "modules": [
            {
                "kind": module.kind,
                "config": module.config,
                "tensors": _tensor_digest(module.weights),
                "others": {str(path.relative_to(module.folder)): file_sha256(path) for path in module.others},
            }
            for module in modules
        ],
        "config": canonical_config(read_document(root / "config.json") or {}),
        "tokenizer": _tokenizer_digest(root),
        **({} if code is None else {"code": code}),
    }
    return hashlib.sha256(canonical_json(document)).hexdigest()


def canonical_json(document: object) -> bytes:
    """The one JSON text of a document: sorted keys, no spaces, ASCII."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def read_document(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, None when there is no such file; `ConfigError` when it is not JSON."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); download the model again") from error
    return document if isinstance(document, dict) else None


def canonical_config(config: dict[str, Any]) -> dict[str, Any]:
    """A transformer's config.json without defaults and without settings that never change a vector."""
    return {
        key: canonical_config(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _IGNORED_SETTINGS and value is not None and value != _DEFAULT_SETTINGS.get(key, ...)
    }


def canonical_module_config(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """A module's config in one spelling for all versions of sentence-transformers."""
    defaults = _MODULE_DEFAULTS.get(kind, {})
    kept = {key: value for key, value in config.items() if value is not None and value != defaults.get(key)}
    if kind == "Transformer":
        kept.pop("max_seq_length", None)  # a field of the spec
    if kind == "Pooling":
        if "word_embedding_dimension" in kept:
            kept.setdefault("embedding_dimension", kept.pop("word_embedding_dimension"))
        flags = {key: kept.pop(key) for key in list(kept) if key in _POOLING_FLAGS}
        modes = kept.pop("pooling_mode", None) or [_POOLING_FLAGS[key] for key in _POOLING_FLAGS if flags.get(key)]
        kept["pooling_mode"] = [modes] if isinstance(modes, str) else list(modes or ["mean"])
    return kept


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, from the disk cache while the file stays the same."""
    return _remembered(path, "sha256", sha256_of)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensor_digest(files: tuple[Path, ...]) -> str | None:
    if not files:
        return None
    tensors: dict[str, list[Any]] = {}
    for file in files:
        tensors |= read_tensors(file)
    # The numbers from 0 upwards: older library versions saved them, newer ones compute them.
    tensors = {name: facts for name, facts in tensors.items() if not name.endswith("embeddings.position_ids")}
    return hashlib.sha256(canonical_json(tensors)).hexdigest()


def read_tensors(path: Path) -> dict[str, list[Any]]:
    """Name → [type, shape, SHA-256 of the bytes] of every tensor in a safetensors file."""
    return _remembered(path, "tensors", _tensors_of)


def _tensors_of(path: Path) -> dict[str, list[Any]]:
    tensors: dict[str, list[Any]] = {}
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        header_bytes = int.from_bytes(view[:8], "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, len(view) - 8):
            raise ConfigError(f"{path} is not a safetensors file; download the model again")
        body = 8 + header_bytes
        for name, entry in json.loads(bytes(view[8:body])).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                with view[body + start : body + stop] as content:
                    tensors[name] = [entry["dtype"], entry["shape"], hashlib.sha256(content).hexdigest()]
    return tensors


def _tokenizer_digest(root: Path) -> str | None:
    tokenizer = read_document(root / "tokenizer.json")
    if tokenizer is None:
        vocabularies = {name: file_sha256(root / name) for name in _VOCABULARIES if (root / name).is_file()}
        if not vocabularies:
            return None
        tokenizer = {"files": vocabularies}
    tokenizer = {key: value for key, value in tokenizer.items() if key not in ("truncation", "padding", "version")}
    settings = read_document(root / "tokenizer_config.json") or {}
    shaping = {key: settings[key] for key in _TOKENIZER_SETTINGS if settings.get(key) not in (None, "right")}
    if settings.get("split_special_tokens"):
        shaping["split_special_tokens"] = True
    inputs = settings.get("model_input_names")
    if inputs is not None and inputs not in _USUAL_INPUTS:
        shaping["model_input_names"] = inputs
    shaping |= _rebuilding(root, tokenizer, settings)
    return hashlib.sha256(canonical_json({"tokenizer": tokenizer, "settings": shaping})).hexdigest()


def _rebuilding(root: Path, tokenizer: dict[str, Any], settings: dict[str, Any]) -> dict[str, str]:
    """The class and the special tokens that make another tokenizer than tokenizer.json; usual ones are left out."""
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if kind in _PLAIN_CLASSES:
        return {}
    if "added_tokens_decoder" not in settings:  # else the library does not read the other file
        settings = settings | (read_document(root / "special_tokens_map.json") or {})
    model_type = str((read_document(root / "config.json") or {}).get("model_type"))
    of_class, of_model = (re.sub("[^a-z]", "", name.lower()) for name in (kind.removesuffix("Tokenizer"), model_type))
    added = [token.get("content") for token in tokenizer.get("added_tokens", ())]
    rebuilding = {} if of_model.startswith(of_class) else {"tokenizer_class": kind}
    for role, usual in _USUAL_TOKENS.items():
        token = settings.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and (token not in usual or (added and token not in added)):
            rebuilding[role] = token
    return rebuilding


def _remembered(path: Path, name: str, read: Callable[[Path], Any]) -> Any:
    """What is read of a file, from the disk cache while the file stays the same."""
    real = path.resolve()
    status = real.stat()
    identity = [status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]
    place = f"digests/{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json"
    document = disk_cache.read_json(place) or {}
    facts = document if document.get("file") == identity else {"file": identity}
    if name not in facts:
        facts[name] = read(path)
        disk_cache.write_json(place, facts)
    return facts[name]
