"""What an agent remembers: within a task, and of earlier episodes. One small file each."""
