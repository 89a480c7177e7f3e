"""Groups where an episode leaves several rows: one for each call of each agent.

The dataflow layer takes the statistics: `dataflow.grouping: agent` is Dr. MAS's grouping, `turn` AT-GRPO's, and every
sample of an episode carries its outcome unless the workflow gives it another reward, which is Flow-GRPO. These are the
definitions that it is checked against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Floats, Ints

    Keys = npt.NDArray[Any]


def grouped(*key_R: Keys) -> Ints:
    """A number for each row, the same for rows whose keys are all the same."""
    group_R = np.zeros(len(key_R[0]), dtype=np.int64)
    for one_R in key_R:
        values, of_R = np.unique(one_R, return_inverse=True)
        group_R = np.unique(group_R * len(values) + of_R, return_inverse=True)[1].astype(np.int64)
    return group_R


def dr_mas(prompt_R: Keys, agent_R: Keys) -> Ints:
    """Each agent is compared with itself: its own mean and std, so that none drowns another's signal."""
    return grouped(prompt_R, agent_R)


def at_grpo(prompt_R: Keys, turn_R: Keys, agent_R: Keys) -> Ints:
    """Only calls of one agent at one turn have prompts alike enough to be compared."""
    return grouped(prompt_R, turn_R, agent_R)


def flow_grpo(outcome_E: Floats, episode_R: Ints) -> Floats:
    """The score of every turn of the trained role is the outcome of its episode. `episode_R` indexes the episodes."""
    score_R: Floats = outcome_E[episode_R]
    return score_R
