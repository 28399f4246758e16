"""A small model reads a text and answers two questions about it, streaming.

Usage: python examples/demo.py [MODEL]
"""

import sys
from pathlib import Path

from minikv import LLM, ChatSession, MinikvError, Result, SamplingParams

TEXT = Path(__file__).parent / "data" / "lighthouse.txt"
QUESTIONS = (
    "What is the registration number of the lighthouse lamp?",
    "What is the name of the city where Margaret Hollis lives?",
)


def ask(session: ChatSession, message: str) -> Result:
    """Print the reply to `message` as it comes; returns the finished turn."""
    result = None
    for piece in session.stream(message, SamplingParams(max_tokens=60)):
        print(piece.text, end="", flush=True)
        result = piece.result
    print()
    assert result is not None, "the last piece of a stream has the result"
    return result


def main(model: str = "smollm2-135m") -> None:
    """Read the text once, ask both questions in one conversation, print speed and KV bytes."""
    text = TEXT.read_text(encoding="utf-8")
    with LLM(model, progress=True) as llm:
        session = llm.chat_session()
        print(f"{llm.name}, backend {llm.backend_name}; the text: {len(llm.tokenizer.encode(text))} tokens")
        turns = []
        for number, question in enumerate(QUESTIONS):
            print(f"\n> {question}")
            turns.append(ask(session, f"{text}\n\n{question}" if number == 0 else question))

        prefilled = sum(turn.usage.prompt_tokens - turn.usage.reused_tokens for turn in turns)
        decoded = sum(turn.usage.completion_tokens - 1 for turn in turns)  # the first comes with the prefill
        print(f"\nprefill  {prefilled / sum(turn.timings.prefill_s for turn in turns):8.1f} tokens/s")
        print(f"decode   {decoded / sum(turn.timings.decode_s for turn in turns):8.1f} tokens/s")
        print(f"reused   {turns[-1].usage.reused_tokens:8d} tokens of the first turn in the second")
        print(f"KV cache {session.kv_bytes:,} bytes for {session.num_tokens} tokens")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MinikvError as error:
        sys.exit(str(error))
