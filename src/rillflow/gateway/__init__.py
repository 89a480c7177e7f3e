"""Sessions, token trees, chat rendering and the dialects that agents speak."""

from rillflow.gateway.calls import Policy
from rillflow.gateway.record import Sample, SessionRecord
from rillflow.gateway.render import Renderer
from rillflow.gateway.server import Gateway, anthropic_url, session_url
from rillflow.gateway.session import Sessions

__all__ = ["Gateway", "Policy", "Renderer", "Sample", "SessionRecord", "Sessions", "anthropic_url", "session_url"]
