"""Many prompts, one model: answers come in the order they finish, a bad prompt costs only itself.

Usage: python examples/offline_batch.py [PROMPTS.txt] [MODEL]      (one prompt a line)
"""

import sys
from pathlib import Path

from minikv import LLM, Job, SamplingParams

WORDS = ("bridge", "candle", "harbour", "lantern", "meadow", "orchard", "river", "violin")


def main(path: str | None = None, model: str = "smollm2-135m") -> int:
    """Print one tab-separated line per prompt; returns the number of failures."""
    lines = Path(path).read_text(encoding="utf-8").splitlines() if path else None
    prompts = lines or [f"Write one sentence about a {word}." for word in WORDS]
    params = SamplingParams(max_tokens=32)
    jobs = (Job(n, messages=[{"role": "user", "content": p}], params=params) for n, p in enumerate(prompts))
    failures = 0
    with LLM(model, max_seqs=8) as llm:
        for job, result in llm.run(jobs):
            failures += result.finish_reason == "error"
            print(job.key, result.finish_reason, repr(result.message or result.text), sep="\t", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:3]) else 0)
