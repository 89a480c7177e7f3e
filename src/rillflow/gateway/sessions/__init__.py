"""Sessions, their log on disk, and their rewards."""
