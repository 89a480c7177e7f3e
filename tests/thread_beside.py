"""Preloaded by a fork server in tests: a thread that never ends, as a library might start one."""

from __future__ import annotations

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
