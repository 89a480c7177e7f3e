"""Sessions, token trees, chat rendering and the dialects that agents speak."""

from rillflow.gateway.limits import GatewayLimits
from rillflow.gateway.record import Sample, SessionRecord
from rillflow.gateway.render import Renderer
from rillflow.gateway.server import Gateway, session_url
from rillflow.gateway.session import Sessions

__all__ = ["Gateway", "GatewayLimits", "Renderer", "Sample", "SessionRecord", "Sessions", "session_url"]
