"""Whatever happens in whatever order: the audit balances, nothing acknowledged is lost, nothing is trained twice."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from ledger_faults import FaultyMachine

from soak import repetitions


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


class TestLedgerMachine(FaultyMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = _settings(8, 30)


@pytest.mark.slow
@pytest.mark.soak
class TestLedgerMachineForLonger(FaultyMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = _settings(repetitions(200, 3000), 50)
