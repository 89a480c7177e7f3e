"""`python -m rillflow` is the same as `rillflow`."""

from rillflow.cli.main import app

app()
