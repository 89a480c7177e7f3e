"""How published weights get from a store to those who want them.

objects     sources: the store's folder, an object store; `open_source` finds the right one
remote      the source over HTTP: mirrors (several servers), download (ranges at once), partial (what has come)
serve       the weight server; shelf: what is on it
relay       a server that fetches what it is asked for; following: the line upstream
cache       files that can be fetched again; apart: a source in a thread of its own
upload      the store, copied to an object store
"""
