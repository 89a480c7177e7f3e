"""The gateway: sessions, token trees, chat rendering and the dialects of agents."""

from rillflow.gateway.calls import Policy
from rillflow.gateway.server import Gateway, anthropic_url, session_url
from rillflow.gateway.sessions.session import Sessions
from rillflow.gateway.trees.record import Sample, SessionRecord
from rillflow.gateway.trees.render import Renderer

__all__ = ["Gateway", "Policy", "Renderer", "Sample", "SessionRecord", "Sessions", "anthropic_url", "session_url"]
