"""Every performance claim, measured side by side with its peer. `python -m bench` runs them all."""
