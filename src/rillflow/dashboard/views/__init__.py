"""What each panel shows, in plain values: functions of a `WatchedRun` and of what its service says now."""
