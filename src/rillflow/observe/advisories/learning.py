"""Rules about what is learnt: rewards that say nothing, rewards that are tricked, and policies that fall apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median

from rillflow.observe.advisories.advisory import Advisory, AnswerFacts, Facts, Step, threshold

Number = Callable[[Step], float | None]


def values(steps: Sequence[Step], number: Number) -> list[float]:
    """Return a number of each step that has it."""
    return [value for step in steps if (value := number(step)) is not None]


def window() -> int:
    return int(threshold("few_steps"))


def first(steps: Sequence[Step], number: Number) -> float | None:
    """Return the mean over the first steps."""
    found = values(steps, number)[: window()]
    return fmean(found) if found else None


def last(steps: Sequence[Step], number: Number, of: Callable[[list[float]], float] = fmean) -> float | None:
    """Return the mean over the last steps."""
    found = values(steps, number)[-window() :]
    return of(found) if found else None


def best(steps: Sequence[Step], number: Number) -> float | None:
    """Return the highest mean of as many neighbouring steps."""
    return max(_windows(steps, number, fmean), default=None)


def _windows(steps: Sequence[Step], number: Number, of: Callable[[list[float]], float]) -> list[float]:
    found, size = values(steps, number), window()
    return [of(found[at : at + size]) for at in range(max(1, len(found) - size + 1))] if found else []


def of_policy(facts: Facts, policy: str) -> str:
    """Return how a sentence names the policy: not at all where there is one."""
    return f" of policy {policy}" if len(facts.policies) > 1 and policy else ""


def too_high_rate(facts: Facts) -> Iterator[Advisory]:
    """The learning rate is far too high: updates are not finite or huge, and the reward falls."""
    for policy, steps in facts.policies.items():
        skipped = sum(values(steps, lambda step: step.skipped))
        fallen = _fallen(steps)
        signs = [*_broken_updates(steps, skipped), *_huge_updates(steps, ever=bool(fallen))]
        if not skipped and not (signs and fallen) and len(signs) < _SIGNS:
            continue
        lr = facts.settings.lr.get(policy)
        rate = f"The learning rate{f' {lr:g}' if lr else ''}{of_policy(facts, policy)}"
        yield Advisory(
            key="learning_rate",
            severity="problem",
            title=f"{rate} is far too high: {signs[0]}{f', and {fallen}' if fallen else ''}.",
            why="; ".join([*signs, *([fallen] if fallen else [])]),
            what_to_do=f"Lower trainer.lr ten times{f' (to {lr / 10:g})' if lr else ''} and start again: "
            "weights that were torn apart do not recover.",
            since=next((step.time for step in steps if step.skipped or _is_huge(step)), None),
        )


_SIGNS = 2  # that are enough without a fall of the reward


def _broken_updates(steps: Sequence[Step], skipped: float) -> Iterator[str]:
    if skipped:
        yield f"{skipped:.0f} of {len(steps)} steps had a gradient that is not finite"


def _huge_updates(steps: Sequence[Step], *, ever: bool) -> Iterator[str]:
    """Yield what is huge in the last steps, or if `ever` in any neighbouring ones: a policy that was torn apart may
    give one answer to everything, which no update changes any more."""

    def typical(number: Number) -> float | None:
        return max(_windows(steps, number, median), default=None) if ever else last(steps, number, median)

    kl = typical(lambda step: step.approx_kl)
    if kl is not None and kl > threshold("high_kl"):
        yield f"one update moves the policy by {kl:.2g} nats"
    clipped = typical(lambda step: step.clipped)
    if clipped is not None and clipped > threshold("high_clip"):
        yield f"{clipped:.0%} of the tokens are clipped"
    before, now = first(steps[:1], lambda step: step.grad_norm), last(steps, lambda step: step.grad_norm, median)
    if before and now is not None and now > threshold("grown_gradient") * before:
        yield f"the gradient's norm has grown from {before:.2g} to {now:.2g}"


def _is_huge(step: Step) -> bool:
    return (step.approx_kl or 0.0) > threshold("high_kl") or (step.clipped or 0.0) > threshold("high_clip")


def _fallen(steps: Sequence[Step]) -> str:
    """Return how the reward has fallen from its best, if it has and stays there."""
    top, now = best(steps, lambda step: step.reward), last(steps, lambda step: step.reward)
    if top is None or now is None or top <= 0 or now > threshold("reward_fall") * top:
        return ""
    return f"the reward has fallen from {top:.2f} to {now:.2f}"


def length_hack(facts: Facts) -> Iterator[Advisory]:
    """The reward pays for length: the longer an answer, the higher its reward, and answers grow."""
    for policy, steps in facts.policies.items():
        found = facts.ledger.samples.get(policy)
        if found is None or found.by_length is None or found.count < threshold("length_samples"):
            continue
        before = first(steps[:1], lambda step: step.response_length)
        now = last(steps, lambda step: step.response_length)
        grown = now / before if before and now is not None else 0.0
        if found.by_length < threshold("length_correlation") or grown < threshold("length_growth"):
            continue
        yield Advisory(
            key="length_hack",
            severity="problem",
            title=f"The reward{of_policy(facts, policy)} pays for length: it follows the number of tokens with a "
            f"correlation of {found.by_length:.2f}, and answers have grown from {before:.0f} to {now:.0f} tokens.",
            why=f"{found.count} samples of the latest {found.groups} groups; {_heldout(facts)}",
            what_to_do="Read the longest answers (`rillflow show`), make the reward check what they say, and add a "
            "penalty for length (docs/rewards.md).",
        )


def _heldout(facts: Facts) -> str:
    if len(facts.heldout) < 2:
        return "no held-out evaluation shows whether anything was learnt"
    before, now = facts.heldout[0].reward, facts.heldout[-1].reward
    return f"the held-out reward went from {before:.2f} to {now:.2f}"


def equal_rewards(facts: Facts) -> Iterator[Advisory]:
    """All rewards are the same, so there is nothing to learn from."""
    for policy, found in facts.ledger.samples.items():
        if found.count < threshold("rewards_equal") or found.lowest != found.highest:
            continue
        reward, steps = found.highest, facts.policies.get(policy, [])
        earlier = [value for value in values(steps, lambda step: step.reward) if abs(value - reward) > _SAME]
        what = f"All {found.count} rewards{of_policy(facts, policy)} of the latest {found.groups} groups are {reward:g}"
        if earlier and fmean(earlier) < reward:
            yield Advisory(
                key="solved",
                severity="hint",
                title=f"{what}: these prompts are learnt.",
                why=f"earlier steps had rewards around {fmean(earlier):.2f}",
                what_to_do="Give harder prompts, or end the run: groups without variance teach nothing.",
            )
            continue
        told = f"; earlier steps had {fmean(earlier):.2f}" if earlier else "; no step ever had another"
        yield Advisory(
            key="equal_rewards",
            severity="problem",
            title=f"{what}, so nothing can be learnt.",
            why="; ".join(
                [f"{found.count} samples, mean length {found.tokens:.0f} tokens{told}", *_said(facts, policy)]
            ),
            what_to_do=_SAME_ANSWERS if _all_the_same(facts, policy) else _EQUAL,
        )


_SAME = 1e-9
_EQUAL = (
    "Play one episode with `rillflow try` and look at its answer and reward: either the reward function never pays, or "
    "no answer of this policy ever succeeds (easier prompts, or a warm start by SFT)."
)
_SAME_ANSWERS = (
    "Make the answers differ before anything else: sample at a higher temperature, check that the prompt reaches the "
    "model (`rillflow show`), and start from weights that were not trained into one answer."
)


def _kept(facts: Facts, policy: str) -> AnswerFacts | None:
    """Return what is known of the policy's answers, if these are enough to judge it."""
    found = facts.answers.get(policy)
    return found if found is not None and found.count >= threshold("answers") else None


def _all_the_same(facts: Facts, policy: str) -> bool:
    found = _kept(facts, policy)
    return found is not None and found.same_prompts > 1 and found.same >= threshold("same_answers") * found.count


def _repeats(facts: Facts, policy: str) -> bool:
    found = _kept(facts, policy)
    return found is not None and found.repeating >= threshold("repeating") * found.count


def _said(facts: Facts, policy: str) -> Iterator[str]:
    """Yield what the kept answers show."""
    found = _kept(facts, policy)
    if found is not None and _all_the_same(facts, policy):
        yield f"{found.same} of {found.count} kept answers to {found.prompts} prompts are {found.text}"
    elif found is not None and _repeats(facts, policy):
        yield f"{found.repeating} of {found.count} kept answers repeat themselves, such as {found.repeated}"


def repeated_answers(facts: Facts) -> Iterator[Advisory]:
    """Answers end in a repetition. `truncated_answers` reports those that are cut because of it."""
    for policy in facts.policies:
        found = _kept(facts, policy)
        if found is None or not _repeats(facts, policy) or _cut_share(facts, policy) >= threshold("truncated"):
            continue
        yield Advisory(
            key="repeated_answers",
            severity="warning",
            title=f"{found.repeating} of {found.count} kept answers{of_policy(facts, policy)} say the same again and "
            "again.",
            why=f"such as {found.repeated}",
            what_to_do=_REPETITION,
        )


_REPETITION = (
    "Read some (`rillflow show`), make the reward pay for what is said and not for how long, lower trainer.lr or add a "
    "KL term to the reference (trainer.kl); a larger limit of tokens makes it worse."
)


def _cut_share(facts: Facts, policy: str) -> float:
    """Return the share of the policy's samples that are cut at their limit of tokens."""
    found = facts.ledger.samples.get(policy)
    share = found.truncated if found is not None else last(facts.policies[policy], lambda step: step.truncated)
    return share or 0.0


def truncated_answers(facts: Facts) -> Iterator[Advisory]:
    for policy, steps in facts.policies.items():
        found, said = facts.ledger.samples.get(policy), _kept(facts, policy)
        share = _cut_share(facts, policy)
        if share < threshold("truncated"):
            continue
        most = facts.settings.max_tokens.get(policy)
        if said is not None and said.cut and said.cut_repeating >= threshold("repeating") * said.cut:
            yield Advisory(
                key="truncated",
                severity="warning",
                title=f"{share:.0%} of the answers{of_policy(facts, policy)} are cut at their limit of tokens because "
                "they repeat themselves.",
                why=f"{said.cut_repeating} of {said.cut} kept answers that were cut, such as {said.repeated}; "
                f"sampling.max_tokens is {most or 'unknown'}",
                what_to_do=_REPETITION,
            )
            continue
        yield Advisory(
            key="truncated",
            severity="warning",
            title=f"{share:.0%} of the answers{of_policy(facts, policy)} are cut at their limit of tokens.",
            why=f"sampling.max_tokens is {most or 'unknown'}, unless a call asks for fewer; an answer has "
            f"{found.tokens if found else last(steps, lambda step: step.response_length) or 0.0:.0f} tokens on average",
            what_to_do="Raise max_tokens of the calls or sampling.max_tokens (and engine.context), tell the model to "
            "be short, or reward an end within the limit: a cut answer is trained as if it were whole.",
        )


def collapse(facts: Facts) -> Iterator[Advisory]:
    """The policy says one thing only, or next to nothing, and is not better for it. Supervised training has no reward,
    and its entropy is meant to fall."""
    for policy, steps in facts.policies.items():
        reward = last(steps, lambda step: step.reward)
        if len(steps) < 2 * window() or reward is None or _risen(steps):
            continue
        for key, name, number, least, cure in (
            ("entropy_collapse", "entropy", lambda step: step.entropy, "entropy_collapse", _MORE_ENTROPY),
            ("length_collapse", "length of answers", lambda step: step.response_length, "length_collapse", _LONGER),
        ):
            before, now = first(steps, number), last(steps, number)
            if before is None or now is None or before <= 0 or now > threshold(least) * before:
                continue
            yield Advisory(
                key=key,
                severity="warning",
                title=f"The {name}{of_policy(facts, policy)} has collapsed from {before:.3g} to {now:.3g} while the "
                f"reward is {reward:.2f}.",
                why="; ".join([f"means of the first and last {window()} of {len(steps)} steps", *_said(facts, policy)]),
                what_to_do=cure,
            )


_MORE_ENTROPY = (
    "Lower trainer.lr, add an entropy bonus or a KL term to the reference (trainer.kl), or sample at a higher "
    "temperature: a policy that always says the same explores nothing."
)
_LONGER = (
    "Look at the answers (`rillflow show`) and at what the reward pays for: short answers must not be the safest ones."
)


def _risen(steps: Sequence[Step]) -> bool:
    before, now = first(steps, lambda step: step.reward), last(steps, lambda step: step.reward)
    return before is not None and now is not None and now > before + _RISEN


_RISEN = 0.05
