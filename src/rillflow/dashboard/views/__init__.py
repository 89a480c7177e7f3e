"""The content of each panel as plain values: functions of a `WatchedRun` and of its service's answers."""
