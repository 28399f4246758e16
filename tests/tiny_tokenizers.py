"""Tiny tokenizers of each family, trained in a moment, and strategies for text in many scripts."""

from __future__ import annotations

import json
from functools import cache

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minikv.text.tokenizer import Tokenizer

CORPUS = (
    "The quick brown fox jumps over the lazy dog, again and again; 1234 5678.\n\n  The end. ",
    "Съешь ещё этих мягких французских булок, да выпей чаю. ",
    "今天天气很好，我们去公园散步吧。 日本語のテキスト。 ",
    "안녕하세요 세계 대한민국 ",
    "مرحبا بالعالم السلام عليكم ",
    "नमस्ते दुनिया हिन्दी ",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 😀😀 ❤️ ",
)
_SCRIPTS = (
    "abc XYZ 019.,\n\t",
    "éßøñçŁ",
    "жЩыё ",
    "今天气世界日本語",
    "안녕하세요세계",
    "مرحبا السلام",
    "नमस्तेक्षि",
    "👩\u200d👧🏽🇩🇪😀❤\ufe0f🤷",
    " \u00a0\u3000\n\r\t",
    "▁Ġ<0x41>\ufffd",
)
texts = st.one_of(
    st.text(alphabet="".join(_SCRIPTS), max_size=40),
    st.lists(st.sampled_from([*CORPUS, "👩‍👩‍👧‍👦", "   ", " a", "नि", "한국"]), max_size=4).map("".join),
)


@cache
def byte_level(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """GPT-2-like, small enough that most characters of other scripts span several tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # Added tokens that are text: they are stored as they are, not in the byte alphabet.
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("two words é", normalized=False)])
    return backend


def _with_bytes(corpus: tuple[str, ...]) -> models.BPE:
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in model["merges"]]
    return models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


@cache
def metaspace() -> tokenizers.Tokenizer:
    """Metaspace with byte fallback; only Latin text has tokens of its own."""
    backend = tokenizers.Tokenizer(_with_bytes(CORPUS[:1]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@cache
def sentencepiece() -> tokenizers.Tokenizer:
    """Llama 2's arrangement: the space rule is in the normaliser, the decoder strips one space."""
    backend = tokenizers.Tokenizer(_with_bytes(CORPUS[:2]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


BACKENDS = {"byte_level": byte_level, "metaspace": metaspace, "sentencepiece": sentencepiece}


def tiny_tokenizer(family: str, **options) -> Tokenizer:
    """A minikv tokenizer of one of `BACKENDS`; every call has a backend of its own."""
    backend = tokenizers.Tokenizer.from_str(BACKENDS[family]().to_str())
    bos, eos = (0, 2) if family == "byte_level" else (1, 2)
    return Tokenizer(backend, **({"bos_token_id": bos, "eos_token_ids": (eos,)} | options))
