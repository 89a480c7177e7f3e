"""Every performance claim, measured side by side with its peer. Run as `python -m bench.NAME --quick --json -`."""
