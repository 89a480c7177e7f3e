"""The browser of trajectories: pages of the table, token trees, and tokens with what is known of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dashboard_run import make_run

from kept_trajectories import token_path, trajectory
from rillflow.dashboard.trajectories import Piece, Wanted, episode, table, token_trees, tokens
from rillflow.dashboard.watched import WatchedRun
from rillflow.errors import BadRequest, DataError
from rillflow.storage.trajectories import Bounds, TrajectoryStore
from rillflow.storage.trajectory_format import FILE, KINDS, TokenPath


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    folder = make_run(tmp_path)
    store = TrajectoryStore(folder.root / FILE, Bounds(1 << 24, dict.fromkeys(KINDS, 100)))
    for number in range(30):
        kept = "failure" if number % 10 == 0 else "sample"
        store.add(trajectory(f"t{number}", time=float(number), reward=number / 30, step=number // 3, kept=kept))
    store.add(trajectory("forked", time=99.0, samples=forked()))
    store.close()
    return WatchedRun(folder, "run")


def path_of(*ids: int, mask: str, policy: str = "agent", **others: object) -> TokenPath:
    """A path with these tokens; `mask` has a 1 for each that trains."""
    bits = np.array([int(bit) for bit in mask], np.uint8)
    return token_path(
        len(ids), policy=policy, tokens=np.array(ids, np.int32), mask=bits,
        logprobs=np.full(len(ids), -0.5, np.float32), versions=np.where(bits, 3, -1).astype(np.int32), **others,
    )  # fmt: skip


def forked() -> list[TokenPath]:
    """Two paths that share their prompt and the first answer, which trains in the first of them."""
    first = path_of(1, 2, 3, 4, 5, 6, mask="001101", advantages=np.arange(6, dtype=np.float32))
    second = path_of(1, 2, 3, 4, 7, 8, 9, mask="0000011", fork="other history")
    return [first, second]


def test_pages_of_the_table_are_sorted_and_filtered(run: WatchedRun) -> None:
    page = table(run, Wanted(order="-reward", limit=5, offset=5, kept="sample"))
    assert page["count"] == 28
    assert [row["id"] for row in page["rows"]] == ["t25", "t24", "t23", "t22", "t21"]
    assert table(run, Wanted(first_step=2, last_step=3))["count"] == 6
    assert table(run, Wanted(least=0.9))["count"] == 4
    assert table(run, Wanted(prompt="none"))["rows"] == []
    with pytest.raises(DataError):
        table(run, Wanted(order="roles"))


def test_a_run_without_trajectories_has_an_empty_table(tmp_path: Path) -> None:
    assert table(WatchedRun(make_run(tmp_path), "run"), Wanted())["count"] == 0


def test_what_paths_share_is_drawn_once() -> None:
    [tree] = token_trees(forked())
    assert (tree.rows, tree.tokens, tree.cut) == (2, 7, False)
    assert tree.pieces == [
        Piece(0, 2, 0, 0, False, 2, -1),
        Piece(2, 4, 0, 0, True, 2, 0),
        Piece(4, 5, 0, 0, False, 1, 1),
        Piece(5, 6, 0, 0, True, 1, 2),
        Piece(4, 5, 1, 1, False, 1, 1, "other history"),
        Piece(5, 7, 1, 1, True, 1, 4),
    ]


def test_paths_that_share_nothing_have_rows_of_their_own() -> None:
    samples = [path_of(1, 2, mask="01"), path_of(5, 6, mask="01"), path_of(1, 2, mask="11", policy="other")]
    trees = token_trees(samples)
    assert [(tree.policy, tree.rows) for tree in trees] == [("agent", 2), ("other", 1)]
    assert {piece.sample for piece in trees[1].pieces} == {2}


def test_a_path_that_goes_on_from_the_end_of_another_stays_in_its_row() -> None:
    [tree] = token_trees([path_of(1, 2, mask="01"), path_of(1, 2, 3, 4, mask="0001")])
    assert tree.rows == 1
    assert [(piece.begin, piece.end, piece.sample) for piece in tree.pieces] == [
        (0, 1, 0),
        (1, 2, 0),
        (2, 3, 1),
        (3, 4, 1),
    ]


def test_an_episode_has_its_conversation_and_trees(run: WatchedRun) -> None:
    shown = episode(run, "forked")
    assert shown["info"]["forks"] == 1
    assert [message["role"] for message in shown["paths"][0]["messages"]] == ["user", "assistant"]
    assert shown["trees"][0].rows == 2
    assert [sample["trained"] for sample in shown["samples"]] == [3, 2]
    with pytest.raises(DataError):
        episode(run, "unknown")


def test_tokens_have_texts_and_what_is_known_of_them(run: WatchedRun) -> None:
    shown = tokens(run, "forked", 0)
    assert shown["mask"] == [0, 0, 1, 1, 0, 1]
    assert shown["advantages"][3] == 3.0
    assert shown["differences"] is None  # no trainer has reported its log-probs
    assert len(shown["texts"]) == 6
    assert shown["unknown"] == ""
    assert tokens(run, "forked", 1, offset=5)["ids"] == [8, 9]
    with pytest.raises(BadRequest):
        tokens(run, "forked", 2)


def test_ids_are_shown_where_the_tokenizer_is_missing(run: WatchedRun) -> None:
    shown = tokens(run, "t3", 0)  # of a policy that the recipe does not have
    assert shown["texts"][0] == f"⟨{shown['ids'][0]}⟩"
    assert "policy" in shown["unknown"]
