"""What the planner and the verifier are asked. A recipe may have its own words (`options.prompts`).

`{question}`, `{memory}`, `{actions}` and `{left}` (the steps that are left) are replaced; everything else stays as it
is, so a prompt may show JSON.
"""

from __future__ import annotations

from collections.abc import Mapping

from rillflow.agents.options import fill_template

PROMPTS: dict[str, str] = {
    "planner": (
        "You plan, one step at a time, how a question is answered. Tools carry out each step for you.\n"
        "Write exactly one JSON object with the keys thought (why), action (one of: {actions}) and action_input (what "
        "the action gets). The action answer ends the task: its input is the final answer and nothing else.\n\n"
        "Question: {question}\n\nWhat was done so far:\n{memory}\n\nSteps left: {left}"
    ),
    "final": "{planner}\n\nEnough is known. The only action left is answer.",
    "verifier": (
        "Judge whether what was found is enough to answer a question for certain. When in doubt, it is not.\n"
        'Write exactly one JSON object: {"sufficient": true} or {"sufficient": false}.\n\n'
        "Question: {question}\n\nWhat was done so far:\n{memory}"
    ),
}


def asked(
    prompts: Mapping[str, str], part: str, *, question: str, memory: str, actions: str = "", left: int = 0
) -> str:
    """Return the text of one prompt; `part` is planner, final or verifier."""
    values = {"question": question, "memory": memory or "nothing", "actions": actions, "left": str(left)}
    if part == "final":
        values["planner"] = fill_template(prompts["planner"], values)
    return fill_template(prompts[part], values)
