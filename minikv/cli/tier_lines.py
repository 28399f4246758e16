"""What is in the tiers below the page pool, and what moved, in lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minikv.config import format_size

if TYPE_CHECKING:
    from minikv.llm import LLM


def tier_lines(llm: LLM) -> list[str]:
    """A line for each tier that there is, then one for what came of them; none without tiers."""
    stats = llm.tier_stats
    if stats is None:
        return []
    # Without a ceiling of its own, warm only holds what is on its way to the file.
    there = ("warm", "cold") if llm.engine.config.tiers.warm is not None else ("cold",)
    lines = [
        f"{tier} tier: {format_size(stats[f'{tier}_bytes'])} in {stats[f'{tier}_spans']:,} spans, "
        f"read {stats[f'{tier}_hits']:,} times"
        for tier in there
        if f"{tier}_bytes" in stats
    ]
    events = [
        (stats["sequences_demoted"], "sequences demoted"),
        (stats["sequences_restored"], "sequences put back"),
        (stats["turns_restored"], "turns begun with all that was demoted"),
        (stats["prompts_staged"], "prompts read layer by layer"),
        (stats["prefix_hits"], f"prompts begun with {stats['prefix_tokens']:,} tokens known"),
        (stats["zoomed_rows"], "rows zoomed in"),
        (stats["refused"], "times no room"),
        (stats["misses"], "spans lost"),
        (stats.get("cold_damaged", 0), "records damaged"),
        (stats.get("cold_faults", 0), "reads or writes refused by the system"),
    ]
    happened = ", ".join(f"{count:,} {what}" for count, what in events if count)
    return [*lines, f"tiers: {happened}"] if happened else lines
