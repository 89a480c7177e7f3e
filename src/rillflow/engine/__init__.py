"""Engines: token ids in; chunks of ids, log-probs and version out. The contract is `rillflow.contracts.Engine`."""
