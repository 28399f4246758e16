"""minikv inside another program: one thread, no network, a KV cache that cannot pass its ceiling.

Usage: python examples/embed.py [NOTE.txt] [MODEL]
The model must be on disk already (`minikv pull MODEL`).
"""

import sys
from pathlib import Path

from minikv import LLM, CacheConfig, MinikvError, Result, SamplingParams, TierConfig

NOTE = Path(__file__).parent / "data" / "lighthouse.txt"
QUESTION = "What is this text about? Answer in one sentence."
KV_CEILING = "24MiB"


def answer(llm: LLM, note: str) -> Result:
    """Ask about `note`; as long as it does not fit under the ceiling, drop its second half.

    A request that does not fit is a result with a reason, not an exception: nothing was
    allocated for it and the engine serves the next one.
    """
    words = note.split()
    while True:
        message = {"role": "user", "content": f"{' '.join(words)}\n\n{QUESTION}"}
        result = llm.chat([message], SamplingParams(max_tokens=48))
        if result.finish_reason not in ("error", "context") or len(words) < 2:
            return result
        print(f"{len(words)} words: {result.message or 'the context is full'}", file=sys.stderr)
        words = words[: len(words) // 2]


def peak_rss() -> int:
    """Bytes, from the kernel's own count; getrusage would count the program that started us too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def main(path: str = str(NOTE), model: str = "smollm2-135m") -> int:
    """Print the answer and what it cost; returns the exit status."""
    cache, tiers = CacheConfig(kv_dtype="float16"), TierConfig(hot=KV_CEILING)
    try:
        note = Path(path).read_text(encoding="utf-8")
        with LLM(model, cache=cache, tiers=tiers, offline=True, max_seqs=1, threads=1) as llm:
            result = answer(llm, note)
            print(result.message or result.text)
            print(f"KV bytes  {result.kv.bytes:11,d} of at most {llm.pool_bytes:,d}")
    except (MinikvError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"peak RSS  {peak_rss():11,d} bytes, weights included")
    return 0 if result.finish_reason != "error" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
