"""Models of many architectures, a few thousand random weights each, made on the spot as
sentence-transformers folders.

Random weights are a harder test than trained ones: nothing is smooth, so a wrong mask, position or
special token shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

HIDDEN = 32
_LAYERS: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2}
_ENCODER: dict[str, Any] = _LAYERS | {"intermediate_size": 64, "initializer_range": 0.3}
_CORPUS = [
    "Return the rows whose key stands in the index, in the order of the index.",
    "Stainless steel bottle, 750 ml, keeps drinks cold for a day; lid and strap included (black)",
    "def f(x: int) -> str: return f'{x!r}'  # a comment about what it does and why",
    "Größe 43, naïve façade, Ærøskøbing, 東京の夜景, пример текста, 3.14159",
    "The quick brown fox jumps over the lazy dog while seven wizards mix strange potions.",
] * 4


def _words(texts: Iterable[str], splitter: pre_tokenizers.PreTokenizer) -> list[str]:
    """The words of the texts, each once. A vocabulary is made of them, because trainers make
    another one each time."""
    return list(
        dict.fromkeys(word for text in texts for word, _ in splitter.pre_tokenize_str(text))
    )


def _word_piece() -> transformers.PreTrainedTokenizerFast:
    """BERT's kind: [CLS] text [SEP]."""
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    words = _words(map(normalizer.normalize_str, _CORPUS), splitter)
    letters = sorted(set("".join(words)))
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *letters,
        *(f"##{letter}" for letter in letters),
        *words,
    ]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    )


def _unigram(single: str, special: list[str], pad: str) -> transformers.PreTrainedTokenizerFast:
    """sentencepiece's kind, as XLM-R and T5 have it."""
    splitter = pre_tokenizers.Metaspace()
    words = _words(_CORPUS, splitter)
    scores = (
        dict.fromkeys(special, 0.0)
        | dict.fromkeys(sorted(set("".join(words))), -9.0)
        | dict.fromkeys(words, -5.0)
    )
    tokenizer = Tokenizer(models.Unigram(list(scores.items()), special.index("<unk>"), False))
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[(token, special.index(token)) for token in special if token in single],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token="<unk>",
        eos_token="</s>",
        model_max_length=64,
    )


def _byte_level(padding_side: str) -> transformers.PreTrainedTokenizerFast:
    """A decoder's kind: bytes, and no special token around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|end|>",
        padding_side=padding_side,
        model_max_length=64,
    )


def _saved(
    folder: Path,
    tokenizer: transformers.PreTrainedTokenizerFast,
    config: transformers.PretrainedConfig,
    make: Callable[[Any], transformers.PreTrainedModel],
    rest: list[torch.nn.Module],
    std: float = 0.3,
    **settings: Any,
) -> Path:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = make(config)
    # Default weights are so small that every text would get nearly the same vector; larger ones
    # make more of rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder / "transformer")
    tokenizer.save_pretrained(folder / "transformer")
    first = modules.Transformer(str(folder / "transformer"))
    SentenceTransformer(modules=[first, *rest], device="cpu", **settings).save_pretrained(
        str(folder / "model")
    )
    return folder / "model"


def _pooling(mode: Any, **settings: Any) -> torch.nn.Module:
    return modules.Pooling(HIDDEN, pooling_mode=mode, **settings)


def _bert(folder: Path, rest: list[torch.nn.Module], **settings: Any) -> Path:
    config = transformers.BertConfig(vocab_size=220, max_position_embeddings=64, **_ENCODER)
    return _saved(folder, _word_piece(), config, transformers.BertModel, rest, **settings)


def bert_cls(folder: Path) -> Path:
    return _bert(folder, [_pooling("cls"), modules.Normalize()])


def bert_truncated_on_the_left(folder: Path) -> Path:
    config = transformers.BertConfig(vocab_size=220, max_position_embeddings=64, **_ENCODER)
    tokenizer = _word_piece()
    tokenizer.truncation_side = "left"
    return _saved(
        folder, tokenizer, config, transformers.BertModel, [_pooling("mean"), modules.Normalize()]
    )


def bert_matryoshka(folder: Path) -> Path:
    """Keeps the first 12 dimensions, which are not scaled to length 1 again."""
    return _bert(folder, [_pooling("mean"), modules.Normalize()], truncate_dim=12)


def mpnet_mean(folder: Path) -> Path:
    config = transformers.MPNetConfig(
        vocab_size=220, max_position_embeddings=66, pad_token_id=1, **_ENCODER
    )
    tokenizer = _unigram("<s> $A </s>", ["<s>", "<pad>", "</s>", "<unk>"], "<pad>")
    rest = [_pooling("mean"), modules.Normalize()]
    return _saved(folder, tokenizer, config, transformers.MPNetModel, rest)


def modernbert_cls(folder: Path) -> Path:
    """Rotary positions, and every other layer sees its neighbourhood only."""
    layers: dict[str, Any] = _ENCODER | {"num_hidden_layers": 4}
    config = transformers.ModernBertConfig(
        vocab_size=220,
        max_position_embeddings=64,
        local_attention=8,
        layer_types=["full_attention", "sliding_attention"] * 2,
        pad_token_id=0,
        **layers,
    )
    rest = [_pooling("cls"), modules.Normalize()]
    return _saved(folder, _word_piece(), config, transformers.ModernBertModel, rest, std=0.1)


def distilbert_mean(folder: Path) -> Path:
    config = transformers.DistilBertConfig(
        vocab_size=220, max_position_embeddings=64, dim=HIDDEN, n_layers=2, n_heads=2, hidden_dim=64
    )
    return _saved(
        folder,
        _word_piece(),
        config,
        transformers.DistilBertModel,
        [_pooling("mean"), modules.Normalize()],
    )


def bert_several_poolings(folder: Path) -> Path:
    return _bert(folder, [_pooling(("max", "mean_sqrt_len_tokens"))])


def bert_prompt_left_out_of_the_mean(folder: Path) -> Path:
    rest = [_pooling("mean", include_prompt=False), modules.Normalize()]
    return _bert(folder, rest, prompts={"document": "for the index: "})


def xlm_roberta_with_dense(folder: Path) -> Path:
    """Knows the tokens of its tokenizer and no others."""
    tokenizer = _unigram("<s> $A </s>", ["<s>", "<pad>", "</s>", "<unk>"], "<pad>")
    config = transformers.XLMRobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=1, **_ENCODER
    )
    rest = [_pooling("mean"), modules.Dense(HIDDEN, 24), modules.Normalize()]
    return _saved(folder, tokenizer, config, transformers.XLMRobertaModel, rest)


def esm_with_token_dropout(folder: Path) -> Path:
    """Scales the embeddings of a text by its share of mask tokens."""
    tokenizer = _word_piece()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    mask_id: Any = tokenizer.mask_token_id
    config = transformers.EsmConfig(
        vocab_size=len(tokenizer),
        mask_token_id=mask_id,
        pad_token_id=0,
        max_position_embeddings=66,
        position_embedding_type="rotary",
        token_dropout=True,
        **_ENCODER,
    )
    rest = [_pooling("mean"), modules.Normalize()]
    return _saved(folder, tokenizer, config, transformers.EsmModel, rest)


def t5_with_dense(folder: Path) -> Path:
    config = transformers.T5Config(
        vocab_size=220, d_model=HIDDEN, d_kv=16, d_ff=64, num_layers=2, num_heads=2
    )
    tokenizer = _unigram("$A </s>", ["<pad>", "</s>", "<unk>"], "<pad>")
    dense = modules.Dense(HIDDEN, 24, bias=False, activation_function=torch.nn.Identity())
    rest = [_pooling("mean"), dense, modules.Normalize()]
    return _saved(folder, tokenizer, config, transformers.T5EncoderModel, rest)


def _decoder_config(
    kind: Callable[..., transformers.PretrainedConfig],
) -> transformers.PretrainedConfig:
    return kind(
        vocab_size=400,
        max_position_embeddings=64,
        num_key_value_heads=2,
        pad_token_id=0,
        **_ENCODER,
    )


def qwen2_last_token(folder: Path) -> Path:
    config = _decoder_config(transformers.Qwen2Config)
    rest = [_pooling("lasttoken"), modules.Normalize()]
    # With larger weights sentence-transformers' own bf16 vectors have a cosine of 0.996 to those in
    # fp32.
    return _saved(folder, _byte_level("left"), config, transformers.Qwen2Model, rest, std=0.2)


def qwen3_last_token(folder: Path) -> Path:
    """Prompts as Qwen3's embedding models state them: an instruction before queries, nothing before
    documents."""
    config = transformers.Qwen3Config(
        vocab_size=400,
        max_position_embeddings=64,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
        **_ENCODER,
    )
    prompts = {"query": "Instruct: find rows\nQuery:", "document": ""}
    rest = [_pooling("lasttoken"), modules.Normalize()]
    return _saved(
        folder, _byte_level("left"), config, transformers.Qwen3Model, rest, std=0.1, prompts=prompts
    )


def gemma3_overflowing_fp16(folder: Path) -> Path:
    """Two Dense heads behind the mean, as in EmbeddingGemma, and activations beyond 65,504."""
    config = transformers.Gemma3TextConfig(
        vocab_size=400,
        max_position_embeddings=64,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
        use_bidirectional_attention=True,
        **_ENCODER,
    )
    heads = [modules.Dense(HIDDEN, 64, bias=False, activation_function=torch.nn.Identity())]
    heads.append(modules.Dense(64, HIDDEN, bias=False, activation_function=torch.nn.Identity()))
    with torch.no_grad():
        heads[0].linear.weight.mul_(1e6)
    rest = [_pooling("mean"), *heads, modules.Normalize()]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    return _saved(
        folder, _byte_level("right"), config, transformers.Gemma3TextModel, rest, prompts=prompts
    )


def llama_weighted_mean(folder: Path) -> Path:
    config = _decoder_config(transformers.LlamaConfig)
    return _saved(
        folder, _byte_level("right"), config, transformers.LlamaModel, [_pooling("weightedmean")]
    )


def bert_with_prompts(folder: Path) -> Path:
    rest = [_pooling("mean"), modules.Normalize()]
    return _bert(
        folder, rest, prompts={"query": "query about: ", "document": "a passage of the index: "}
    )


def static_embedding(folder: Path) -> Path:
    tokenizer = _word_piece().backend_tokenizer
    first = modules.StaticEmbedding(tokenizer, embedding_dim=HIDDEN)
    SentenceTransformer(modules=[first, modules.Normalize()], device="cpu").save_pretrained(
        str(folder / "model")
    )
    return folder / "model"
