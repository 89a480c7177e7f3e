"""The parts of a ledger, made in the order in which they depend on each other."""

from __future__ import annotations

from rillflow.contracts import PromptSource
from rillflow.dataflow.balance_ledger import Balances
from rillflow.dataflow.hooks import Hooks
from rillflow.dataflow.kept_episodes import KeptEpisodes
from rillflow.dataflow.ledger.attempts import Attempts
from rillflow.dataflow.ledger.batches import Batches
from rillflow.dataflow.ledger.course import Course
from rillflow.dataflow.ledger.database import Base
from rillflow.dataflow.ledger.evaluations import Evaluations
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.leasing import Leasing
from rillflow.dataflow.ledger.lost_rows import LostRows
from rillflow.dataflow.ledger.nodes import Nodes, UserErrors
from rillflow.dataflow.ledger.playing import Playing
from rillflow.dataflow.ledger.samples import Samples
from rillflow.dataflow.ledger.scoring import Scoring
from rillflow.dataflow.ledger.segments import Storage
from rillflow.dataflow.ledger.shares import Shares
from rillflow.dataflow.ledger.stages import Stages
from rillflow.dataflow.ledger.steps import Steps
from rillflow.dataflow.ledger.streams import Streams
from rillflow.dataflow.ledger.tasks import Tasks
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.types import Lane


class Parts:
    def __init__(self, base: Base, hooks: Hooks, source: PromptSource, heldout: PromptSource | None) -> None:
        sources: dict[Lane, PromptSource] = {"train": source}
        if heldout is not None:
            sources["eval"] = heldout
        self.lineage = Lineage(base)
        self.nodes = Nodes(base)
        self.storage = Storage(base)
        self.user_errors = UserErrors(base)
        self.playing = Playing(base)
        self.samples = Samples(base, self.storage, self.playing)
        self.tasks = Tasks(
            base,
            lineage=self.lineage,
            nodes=self.nodes,
            storage=self.storage,
            samples=self.samples,
            playing=self.playing,
            attempts=Attempts(base, self.playing),
            errors=self.user_errors,
        )
        self.shares = Shares(base, self.samples, self.nodes, self.storage)
        self.groups = Groups(
            base,
            hooks=hooks,
            sources=sources,
            lineage=self.lineage,
            playing=self.playing,
            tasks=self.tasks,
            samples=self.samples,
            shares=self.shares,
        )
        self.scoring = Scoring(base, self.groups, self.tasks)
        self.streams = Streams(base, self.playing, self.groups, self.shares, self.lineage)
        self.evaluations = Evaluations(base, self.groups, self.lineage, self.samples, heldout)
        self.leasing = Leasing(
            base,
            groups=self.groups,
            playing=self.playing,
            tasks=self.tasks,
            evaluations=self.evaluations,
            lineage=self.lineage,
            nodes=self.nodes,
            streams=self.streams,
        )
        self.steps = Steps(base, self.groups, self.lineage, self.nodes)
        self.batches = Batches(
            base,
            groups=self.groups,
            shares=self.shares,
            streams=self.streams,
            lineage=self.lineage,
            steps=self.steps,
            hooks=hooks,
        )
        self.stages = Stages(base, self.lineage, self.shares, self.storage)
        self.lost_rows = LostRows(base, self.groups, self.shares, self.batches, self.storage)
        self.kept = KeptEpisodes(base, self.groups, self.lineage)
        self.course = Course(base, hooks, source, self)
        self.balances = Balances(base, base.rules.policy, base.rules.balance_every)
