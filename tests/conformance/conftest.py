"""The checks in `agent_play` say what differs, as assertions in tests do."""

import pytest

pytest.register_assert_rewrite("agent_play")
