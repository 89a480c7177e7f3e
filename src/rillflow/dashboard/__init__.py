"""The dashboard: runs in a browser. It reads run folders, and asks a live run's service what it knows now.

watched.py    one run folder, and what was read of it so far     panels.py  the panels by name; each is a function of a
server.py     panels and files behind HTTP                                  `WatchedRun` that returns plain values
static/       the page itself: HTML, CSS and JavaScript
"""
