"""The dashboard: runs in a browser. It reads run folders, and asks a live run's service what it knows now.

watched.py    one run folder, and what was read of it so far     views/     what each panel shows, as plain values
server.py     views and files behind HTTP                         static/    the page itself: HTML, CSS and JavaScript
"""
