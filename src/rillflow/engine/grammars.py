"""Grammars in llguidance's own form: what the embedded engine samples under, and what a gateway checks before."""

from __future__ import annotations

import llguidance

from rillflow.types import Grammar


def compiled(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return llguidance.LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    return llguidance.LLMatcher.grammar_from_lark(grammar.text)
