"""For tests of the evaluation: a tokenizer with words, and a model that copies what it has read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch
from model_files import hf_config, write_directory
from tiny import RandomWeights
from tokenizers import decoders, models, pre_tokenizers, trainers

from minikv.cache.compress import Report
from minikv.cache.evidence import Recorded
from minikv.evals.haystacks import Writer
from minikv.evals.text import Prose, reference_prose
from minikv.models.hf_config import normalise_config
from minikv.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def word_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """GPT-2-like with single digits, trained on a part of the text: about four characters a token."""
    backend = tokenizers.Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([reference_prose()[:60_000]], trainer)
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=(2,), chat_template=template)


@cache
def word_writer(template: str | None = TEMPLATE) -> Writer:
    """Writes contexts in tokens of `word_tokenizer`."""
    tokenizer = word_tokenizer(template)
    return Writer(tokenizer, Prose(reference_prose(), tokenizer))


def write_word_model(folder: Path) -> Path:
    """A folder with a random model for tokens of `word_tokenizer`, of a context of 2,048 tokens."""
    raw = hf_config(max_position_embeddings=2048, vocab_size=word_tokenizer().vocab_size)
    weights = RandomWeights(normalise_config(raw))
    write_directory(folder, raw, {name: weights.load(name) for name in weights.names()})
    word_tokenizer().backend.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


_LATELY = 60  # tokens: about a question


class CopyingProbe:
    """Stands in for a `Probe` whose model continues as the most similar place before it went on.

    keep: what `compress` leaves of the tokens. log: the calls, as (name, tokens in the sequence).
    """

    def __init__(self, tokenizer: Tokenizer, keep: Callable[[list[int]], list[int]] = lambda ids: ids):
        self.tokenizer = tokenizer
        self.config = SimpleNamespace(vocab_size=tokenizer.vocab_size)
        self.log: list[tuple[str, int]] = []
        self._keep = keep
        self._ids: dict[int, list[int]] = {}
        self._next = 0
        self.store = SimpleNamespace(
            num_lanes=1,
            pool=SimpleNamespace(num_free=10**9),
            bytes_of=lambda seq: 100 * len(self._ids[seq]),
            pages_of=lambda seq: len(self._ids[seq]),
            pages_for=lambda count: count,
        )

    @property
    def num_open(self) -> int:
        return len(self._ids)

    def open(self) -> int:
        return self._new([])

    def fork(self, seq: int) -> int:
        return self._new(list(self._ids[seq]))

    def _new(self, ids: list[int]) -> int:
        self._next += 1
        self._ids[self._next] = ids
        return self._next

    def close(self, seq: int) -> None:
        del self._ids[seq]

    def feed(self, seq: int, ids: Sequence[int], logits: str = "last", recorder: object = None) -> None:
        assert logits == "none"
        self.log.append(("feed", len(ids)))
        self._ids[seq] += ids

    def feed_many(self, seqs, ids_per_seq, logits="last", reply=False):
        out = []
        for seq, ids in zip(seqs, ids_per_seq, strict=True):
            rows = [self._after(self._ids[seq].append(token) or self._ids[seq]) for token in ids]
            out.append(torch.stack(rows) if logits == "all" else rows[-1])
        return out

    def record(self, evidence: object, content: range) -> SimpleNamespace:
        return _Recorder(content, Recorded())

    def compress(self, seq: int, policy: object, cache: object, recorded: object) -> Report:
        before = len(self._ids[seq])
        self.log.append(("compress", before))
        self._ids[seq] = self._keep(self._ids[seq])
        after = len(self._ids[seq])
        return Report((before, after), (100 * before, 100 * after), 0.25)

    def _after(self, ids: list[int]) -> torch.Tensor:
        """Logits after the last token: all for what followed it in the most similar place."""
        last, asked, counts = len(ids) - 1, set(ids[-_LATELY:]), Counter(ids)

        def alike(place: int) -> float:
            # Of places that end the same, the one among words of the question, rare ones above all.
            shared = asked & set(ids[max(0, place - 32) : place])
            return _alike(ids, place, last) + sum(1 / counts[token] for token in shared)

        places = [p for p in range(last - _LATELY) if ids[p] == ids[last]]
        logits = torch.zeros(self.config.vocab_size)
        if places:
            best = max(places, key=alike)
            logits[ids[best + 1]] = 10.0
        return logits


class _Recorder(SimpleNamespace):
    def __init__(self, content: range, recorded: object):
        super().__init__(content=content, result=lambda: recorded)
        self.extended = lambda longer: _Recorder(longer, recorded)


def _alike(ids: list[int], place: int, last: int) -> int:
    """How many tokens up to one place are those up to another."""
    count = 0
    while count < min(place + 1, 40) and ids[place - count] == ids[last - count]:
        count += 1
    return count
